"""The configs that are shipped: each is read, and its graph and plan are checked for its number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlflow.commands.fit import read_fit
from rlflow.commands.graph import main
from tests.slow import slow_but
from tests.test_docs import drawing

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
LEARN = sorted((ROOT / "configs" / "learn").glob("*.yaml"))  # of `make learn`, one rank each
RANKS = {  # others: 1
    "quickstart_sft": 2,
    "quickstart_grpo": 2,
    "quickstart_agent_sft": 2,
    "quickstart_agent_grpo": 2,
    "vlm_quickstart_sft": 2,
    "vlm_quickstart_grpo": 2,
    "agent_sft": 2,
    "agent_calculator": 2,
    "agent_failing_tool": 2,
    "agent_guess": 2,
    "grpo_apart": 2,
    "grpo_one_step_off": 3,
    "grpo_partial_rollout": 2,
    "grpo_expert_parallel": 4,
    "grpo_tensor_parallel": 2,
    "grpo_word_problems": 2,
    "ppo_apart": 4,
    "ppo_one_step_off": 4,
    **dict.fromkeys(["grpo_math_8gpu", "grpo_math_8gpu_fsdp", "qwen3_vl_geo3k_8gpu", "qwen3_vl_geo3k_8gpu_fsdp"], 8),
    **dict.fromkeys(["grpo_math_16nodes", "grpo_math_16nodes_fsdp", "grpo_235b_128gpu"], 128),
}


TWINS = [config for config in CONFIGS if config.stem.endswith("_fsdp")]  # of the configs for GPUs
OTHERS = [config for config in CONFIGS if config not in TWINS]


@pytest.mark.parametrize("config", slow_but([*OTHERS, TWINS[-1]], CONFIGS), ids=lambda config: config.stem)
def test_the_last_rank_of_a_config_has_a_plan_that_trains(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a graph is read without model, dataset and network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("rlflow.run.prepare.load_tokenizer", refuse)
    monkeypatch.setattr("rlflow.data.loader.scan", refuse)
    ranks = RANKS.get(config.stem, 1)
    trainer = yaml.safe_load(config.read_text(encoding="utf-8")).get("trainer", {})
    assert trainer.get("devices", 1) * trainer.get("num_nodes", 1) == ranks
    drawn = tmp_path / "graph.mmd"
    main(["--config", str(config), "--rank", str(ranks - 1), "--draw", str(drawn)])
    planned = capsys.readouterr().out
    assert f"plan of rank {ranks - 1}" in planned
    assert "  train     " in planned
    in_the_docs = [text for name, text in drawing.graphs() if name == f"configs/{config.name}"]
    assert all(text == drawn.read_text() for text in in_the_docs), "python docs/pictures/draw.py"


@pytest.mark.parametrize("config", TWINS, ids=lambda config: config.stem)
def test_a_config_for_gpus_and_its_twin_of_fsdp_differ_in_strategy_and_folder_alone(config: Path) -> None:
    first = config.with_stem(config.stem.removesuffix("_fsdp"))
    one, other = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in (first, config))
    assert other["trainer"].pop("run_dir") == f"{one['trainer'].pop('run_dir')}_fsdp"
    strategies = [each.pop("strategy") for each in (one, other)]
    assert [strategy["class_path"] for strategy in strategies] == ["deepspeed", "fsdp"]
    assert one == other


def test_every_config_for_gpus_has_a_twin_of_fsdp() -> None:
    texts = {config.stem: config.read_text(encoding="utf-8") for config in CONFIGS}
    by_deepspeed = {stem for stem, text in texts.items() if "accelerator: cuda" in text and "deepspeed" in text}
    assert by_deepspeed == {twin.stem.removesuffix("_fsdp") for twin in TWINS}


@pytest.mark.parametrize("config", LEARN, ids=lambda config: config.stem)
def test_a_config_of_the_learning_benchmark_has_settings_that_exist(config: Path) -> None:
    assert read_fit(["--config", str(config)]).trainer.settings.devices == 1


@pytest.mark.parametrize("config", [*CONFIGS, *LEARN], ids=lambda config: config.stem)
def test_a_config_opens_with_a_command_that_runs_it(config: Path) -> None:
    opening = [line for line in config.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any(f"rlflow fit --config {config.relative_to(ROOT)}" in line for line in opening)
