"""`rlflow fit --predict`: before the first step, after the last, and instead of either."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.commands.fit import read_fit
from rlflow.errors import UserError
from rlflow.simulate.hardware import this_machine
from rlflow.simulate.report import compared
from tests.own_folder import make, write


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own, with a config and a machine."""
    make(tmp_path)
    write(tmp_path / "my.yaml", {})
    (tmp_path / "machine.yaml").write_text("like: h100\nrow_seconds: 2.0e-3\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
    # 0.4 million float32 numbers: weights, gradients and two moments of 1.6 MB each, beside the engine's.
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


def test_the_first_step_is_not_counted(folder: Path) -> None:
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
