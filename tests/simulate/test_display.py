"""`rlflow fit --predict`: before the first step, after the last, and instead of either."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlflow.algorithms import DAPO
from rlflow.algorithms.judged import Judged
from rlflow.commands.fit import read_fit
from rlflow.errors import UserError
from rlflow.simulate.display import compared, with_lengths
from rlflow.simulate.hardware import this_machine
from tests.own_folder import forgotten, make, write


@dataclass(eq=False)
class JudgedDAPO(Judged, DAPO):
    """A filter repeats a node that generates with another policy."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's own, with a config and a machine."""
    make(tmp_path)
    write(tmp_path / "my.yaml", {})
    (tmp_path / "machine.yaml").write_text("like: h100\nrow_seconds: 2.0e-3\n")
    monkeypatch.chdir(tmp_path)
    with forgotten(tmp_path):
        yield tmp_path


def test_a_run_is_predicted_before_and_compared_after(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    read_fit(["--config", "my.yaml", "--predict", "machine.yaml"]).fit()
    lines = capfd.readouterr().out.splitlines()
    (before,) = (place for place, line in enumerate(lines) if line.startswith("predicted on machine.yaml: step "))
    first = next(place for place, line in enumerate(lines) if line.startswith("step 1/2"))
    (after,) = (place for place, line in enumerate(lines) if line.startswith("predicted against measured, with"))
    assert before < first < after
    # Prompts such as `3+1=` are 4 tokens, and half of 4 is what a response is taken to be.
    assert lines[before].endswith("with 4.0 + 2.0 tokens a row")
    assert lines[after].endswith("step 2")
    told = {line.split()[0]: line for line in lines[after + 1 :]}
    assert list(told) == ["sync", "rollout", "rewards", "advantages", "actor_loss", "step"]
    assert "16.0 ms" in told["rewards"]  # 8 rows of 2 ms


def test_a_run_that_cannot_fit_ends_before_it_begins(folder: Path) -> None:
    (folder / "small.yaml").write_text("like: h100\nmemory: 1.0e+6\n")
    configured = read_fit(["--config", "my.yaml", "--predict", "small.yaml"])
    # 0.4 million float32 numbers: weights, gradients and two moments of 1.6 MB each, in addition to the engine's.
    with pytest.raises(
        UserError, match=r"cannot fit on small.yaml: rank 0 .* by .* of 1.0 MB while .+ing; `actor` holds 6.6 MB"
    ):
        configured.fit()
    assert not (folder / "runs").exists()


def test_without_the_option_nothing_is_predicted(folder: Path) -> None:
    assert read_fit(["--config", "my.yaml"]).simulation is None


def test_ranks_that_another_started_do_not_predict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert read_fit(["--config", "my.yaml", "--predict"]).simulation is None


def test_a_policy_that_takes_turns_in_an_engine_is_synced_in_every_draw(folder: Path) -> None:
    write(
        folder / "my.yaml",
        {
            "module.class_path": "tests.simulate.test_display.JudgedDAPO",
            "module.init_args.judge": "tiny",
            "module.init_args.judge_length": 4,
            "engines": {"judge": {"share": "actor"}},
        },
    )
    simulation = read_fit(["--config", "my.yaml", "--predict", "machine.yaml"]).simulation
    assert simulation is not None
    path = [work.name for work in simulation.predicted.timelines["rlflow"].critical_path()]
    assert [name for name in path if name.startswith("sync actor")] == ["sync actor", "sync actor (2)"]


def test_the_longest_row_of_data_without_a_limit_is_that_of_the_data(folder: Path) -> None:
    sft = {"module.class_path": "rlflow.algorithms.SFT", "module.init_args": {"actor": {"model": "tiny"}}}
    data = {"data.train.init_args.path": "long.jsonl", "data.prompts_per_step": 1, "data.response": "answer"}
    write(folder / "my.yaml", sft | data)
    simulation = read_fit(["--config", "my.yaml", "--predict", "machine.yaml"]).simulation
    assert simulation is not None
    lengths = with_lengths(simulation).predicted.workload.lengths
    assert (lengths.response, lengths.longest_response) == (2046, 2046)  # `module.max_response_length` is 256


def test_prompts_with_pictures_are_measured_with_their_pictures(tmp_path: Path) -> None:
    config = str(Path(__file__).parents[2] / "configs" / "vlm_quickstart_sft.yaml")
    (tmp_path / "machine.yaml").write_text("like: h100\n")
    simulation = read_fit(["--config", config, "--predict", str(tmp_path / "machine.yaml")]).simulation
    assert simulation is not None
    assert with_lengths(simulation).prompt_tokens == pytest.approx(29.45, abs=0.01)


def test_the_first_step_is_left_out_of_the_measured_median(folder: Path) -> None:
    simulation = read_fit(["--config", "my.yaml", "--predict", "machine.yaml"]).simulation
    assert simulation is not None
    steps = [{"step": float(step), "time/step": seconds} for step, seconds in ((1, 9.0), (2, 1.0), (3, 3.0), (4, 2.0))]
    (title, line) = compared(simulation, [{"step": 0.0, "val/reward": 1.0}, *steps])
    assert title == "predicted against measured, the median of steps 2 to 4"
    assert line.split()[-3:-1] == ["2.0", "s"]


def test_a_machine_that_more_ranks_share_than_it_has_cores_is_slower() -> None:
    name, machine = this_machine(64, on_gpu=False)
    assert name == "this CPU"
    assert machine.computing_on(64).peak_flops < machine.peak_flops
    assert machine.peak_flops > 1e8
