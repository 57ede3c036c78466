"""The predicted step of a config: what grows with the ranks, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlflow.cli import main
from rlflow.commands.simulate import read_simulate
from rlflow.simulate.designs import CONTROLLER, Design
from rlflow.simulate.hardware import PRESETS
from rlflow.simulate.simulation import PredictedStep, Simulation

ROOT = Path(__file__).parents[2]
SIXTEEN_NODES = str(ROOT / "configs" / "grpo_math_16nodes.yaml")
PPO = str(ROOT / "configs" / "ppo.yaml")


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return read_simulate(["--config", SIXTEEN_NODES, "--nodes", "64"])


@pytest.fixture(scope="module")
def largest(simulation: Simulation) -> PredictedStep:
    return simulation.predicted


def step(predicted: PredictedStep, design: Design) -> float:
    return predicted.timelines[design].seconds


def controlled(predicted: PredictedStep, design: Design) -> float:
    """Seconds that a controller is busy."""
    works = predicted.timelines[design].works.values()
    return sum(work.seconds for work in works if CONTROLLER in work.lanes)


def test_every_node_and_exchange_of_the_plan_is_on_the_timeline(largest: PredictedStep) -> None:
    assert list(largest.timelines["rlflow"].works) == [
        "sync actor",
        "rollout",
        "rollout -> rewards, advantages",
        "rollout -> old_logprobs, actor_loss",
        "rewards",
        "old_logprobs",
        "advantages",
        "advantages -> actor_loss",
        "actor_loss",
    ]


def test_a_prompt_is_computed_once_for_its_samples_on_a_rank(largest: PredictedStep) -> None:
    # 8 prompts of 512 tokens on each of 512 ranks, 16 samples of 1,536 to each
    load = largest.workload
    loss = load.graph.nodes["actor_loss"]
    assert load.computed_tokens(loss, 512) == 8 * 512 + 128 * 1536
    assert load.computed_tokens(loss, 2**16) == 512 + 1536  # a sample to a rank
    assert replace(load, share_prefixes=False).computed_tokens(loss, 512) == 128 * 2048
    alone = replace(load.roles["actor"], shares_prefixes=False)
    assert replace(load, roles={**load.roles, "actor": alone}).computed_tokens(loss, 512) == 128 * 2048


def test_an_edge_moves_the_bytes_of_its_columns(largest: PredictedStep) -> None:
    # 512 ranks, 4,096 prompts x 16 samples. A sample: prompt 8 x (1 + 512), response ids 8, mask 1 and logprobs 4 a
    # token of 1,536, and lengths 8, version 8; what ended and its group the actor does not read. 511 of 512 rows lie
    # elsewhere.
    sample = 8 * 513 + 13 * 1536 + 16
    edge = largest.timelines["rlflow"].works["rollout -> old_logprobs, actor_loss"]
    assert edge.nbytes == pytest.approx(65_536 * sample * 511 / 512)


def test_a_padded_row_is_as_long_as_the_config_allows(largest: PredictedStep) -> None:
    sample = 8 * 1025 + 17 * 3072 + 57  # who it is, is known
    assert largest.timelines["padded"].works["rollout ->"].nbytes == pytest.approx(65_536 * sample)


def test_with_weak_scaling_a_step_of_rlflow_stays_as_long(simulation: Simulation) -> None:
    seconds = [step(predicted, "rlflow") for predicted in simulation.growth.values()]
    assert len(seconds) == 7
    assert seconds[-1] < 1.02 * seconds[0]


@pytest.mark.parametrize("design", ["padded", "packed", "store"])
def test_with_weak_scaling_a_controller_is_busy_in_proportion_to_the_ranks(
    simulation: Simulation, design: Design
) -> None:
    growth = simulation.growth
    assert controlled(growth[512], design) == pytest.approx(64 * controlled(growth[8], design), rel=0.02)


def test_rlflow_has_no_controller(largest: PredictedStep) -> None:
    assert controlled(largest, "rlflow") == 0


def test_padding_costs_a_controller_more_and_a_store_less_than_packing(largest: PredictedStep) -> None:
    assert step(largest, "rlflow") < step(largest, "store") < step(largest, "packed") < step(largest, "padded")


def test_the_works_of_the_critical_path_add_up_to_the_step(largest: PredictedStep) -> None:
    for timeline in largest.timelines.values():
        assert sum(work.seconds for work in timeline.critical_path()) == pytest.approx(timeline.seconds)


def test_with_strong_scaling_twice_the_nodes_train_faster() -> None:
    growth = read_simulate(["--config", SIXTEEN_NODES, "--nodes", "16", "--scaling", "strong"]).growth
    assert step(growth[64], "rlflow") > step(growth[128], "rlflow") > 0.5 * step(growth[64], "rlflow")


def test_zero_3_needs_less_memory_of_a_rank_the_more_there_are(simulation: Simulation) -> None:
    growth = simulation.growth
    assert growth[8].memory.kept == pytest.approx(64 * growth[512].memory.kept)


def test_a_model_that_does_not_fit_is_reported_with_role_and_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = ["--module.actor", "Qwen/Qwen2.5-7B", "--module.critic", "Qwen/Qwen2.5-7B"]
    main(["simulate", "--config", PPO, *larger, *own("like: h100\ngpus_per_node: 1")(tmp_path)])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  ! rank"))
    # One process without DeepSpeed divides nothing: 7.6 thousand million float32 weights, gradients and two moments.
    assert line.startswith("  ! rank 0 is out of memory by ")
    assert "of 80.0 GB while generating; `actor` holds 121.8 GB" in line


def test_an_engine_generates_as_many_responses_together_as_the_gpu_s_kind_decides(tmp_path: Path) -> None:
    few = own("like: h100\nmax_num_seqs: 64")(tmp_path)
    plain, of_machine, of_config = (
        read_simulate(["--config", SIXTEEN_NODES, *options]).predicted.timelines["rlflow"].works["rollout"].seconds
        for options in ([], few, ["--rollout.max_num_seqs=64"])
    )
    assert plain < of_machine == of_config
    assert PRESETS["a100"].max_num_seqs == 256


def test_the_command_prints_one_screen_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "step.png"
    main(["simulate", "--config", SIXTEEN_NODES, "--nodes", "128", "--draw", str(picture)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 50
    assert lines[0].startswith("GRPO on 1024 ranks: 128 nodes of 8 h100")
    assert lines[-1] == f"drew {picture}"
    assert picture.read_bytes().startswith(b"\x89PNG")


def own(text: str) -> Callable[[Path], list[str]]:
    """A hardware file of one's own."""

    def write(folder: Path) -> list[str]:
        (folder / "mine.yaml").write_text(text)
        return ["--hardware", str(folder / "mine.yaml")]

    return write


REFUSED: list[tuple[str, list[str] | Callable[[Path], list[str]], str]] = [
    (
        "unknown hardware",
        ["--hardware", "h10"],
        "`--hardware` is 'h10', neither a preset nor an existing YAML file; give a100, h100, h200 or",
    ),
    (
        "a missing file",
        ["--hardware", "no.yaml"],
        "`--hardware` is 'no.yaml', neither a preset nor an existing YAML file",
    ),
    ("no picture", ["--draw", "step.txt"], "`--draw` is 'step.txt'; end it in one of .png"),
    ("no bandwidth", own("like: h100\nmemory_bandwidth: -1"), "`memory_bandwidth` of the hardware is -1"),
    (
        "a misspelt key",
        own("like: h100\nmemry: 1.0"),
        "mine.yaml', which holds no hardware: Option 'memry' is not accepted",
    ),
    (
        "half a machine",
        own("peak_flops: 1.0e+12"),
        "arguments are required: memory, memory_bandwidth, node_bandwidth, network_bandwidth",
    ),
    (
        "a text for a number",
        own("like: h100\nmemory: 80GB"),
        "Parser key \"memory\": Expected a <class 'float'>. Got value: 80GB",
    ),
    (
        "more than all",
        own("like: h100\nlink_efficiency: 2.0"),
        "`link_efficiency` of the hardware is 2.0; it is a share",
    ),
    ("no nodes", ["--nodes", "0"], "`--nodes` is 0; give 1 or more"),
    (
        "fractions of updates",
        ["--nodes", "3", "--data.prompts_per_step", "1000"],
        "`prompts_per_step` is 1000, which on 24",
    ),
    ("engines of 3", ["--rollout.tensor_parallel_size", "3"], "is 3, which does not divide the 8 ranks"),
    (
        "heads in 8",
        ["--rollout.tensor_parallel_size", "8"],
        "is 8, which does not divide the model's 28 attention heads",
    ),
    ("one process", ["--strategy", "single"], "and 8 ranks are simulated; give `--strategy deepspeed`"),
    (
        "an unknown model",
        ["--module.actor.model", "nowhere"],
        "`model` is 'nowhere', where no config.json says how large it is",
    ),
    (
        "too long a response",
        ["--response_tokens", "4000"],
        "`--response_tokens` is 4000, and the config allows up to 3072",
    ),
]


@pytest.mark.parametrize(("arguments", "told"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_be_simulated_is_refused_in_one_line(
    arguments: list[str] | Callable[[Path], list[str]], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments if isinstance(arguments, list) else arguments(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--config", SIXTEEN_NODES, *given])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlflow: error: ")
    assert told in line
