"""A run that is killed anywhere resumes as if it had not been killed: all its results are equal to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlflow.models.tiny import write_tiny_model, write_tiny_vision_model
from tests.families.states import write_model
from tests.faults.killed_runs import POINTS, Kind, content, fit_to_the_end, fit_until_killed
from tests.faults.run_combinations import kinds, points, runs
from tests.ranks import RankError, RankPool
from tests.slow import slow_but

pytestmark = pytest.mark.row("bit-exact resume")

QUICK = [
    (Kind("grpo", "one", "single", "transformers", False), "in a reward"),
    (Kind("ppo", "together", "zero2", "transformers", True), "before the commit"),
    (Kind("partial", "one", "single", "transformers", False), "after the commit"),
]
RESUMED = "while it is resumed"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("killed") / "tiny", hidden_size=128, layers=1)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind, Path, RankPool], dict[str, Any]]:
    """The results of a run of a kind that nobody kills; each kind runs once with a model."""
    found: dict[tuple[Kind, Path], dict[str, Any]] = {}

    def left(kind: Kind, model: Path, ranks: RankPool) -> dict[str, Any]:
        if (kind, model) not in found:
            folder = tmp_path_factory.mktemp(str(kind)) / "run"
            ranks.run(fit_to_the_end, kind.run(model, folder), timeout_s=240)
            found[kind, model] = content(folder)
        return found[kind, model]

    return left


def check(kind: Kind, point: str, model: Path, folder: Path, expected: Callable[..., dict[str, Any]]) -> None:
    with RankPool(kind.ranks) as ranks:
        whole = expected(kind, model, ranks)
        first = "end of a step" if point == RESUMED else point
        killed(kind.run(model, folder), first, folder.with_name("pids"), ranks)
        again = kind.run(model, folder, ckpt_path="auto")  # none yet where the first is written beside the steps
        if point == RESUMED:
            killed(again, point, folder.with_name("pids"), ranks)
        ranks.run(fit_to_the_end, again, timeout_s=240)
    left = content(folder)
    assert sorted(left) == sorted(whole)
    assert [name for name in whole if left[name] != whole[name]] == []


def killed(run: Any, point: str, pids: Path, ranks: RankPool) -> None:
    """Run until a rank comes to the point, when all are killed."""
    with pytest.raises(RankError, match="exit code -9"):
        ranks.run(fit_until_killed, run, point, pids, timeout_s=240)


@pytest.mark.parametrize(
    ("kind", "point"), slow_but(QUICK[1:2], QUICK), ids=[f"{kind}: {point}" for kind, point in QUICK]
)
def test_a_killed_run_resumes_to_the_byte(
    kind: Kind, point: str, model: Path, tmp_path: Path, uninterrupted: Any
) -> None:
    check(kind, point, model, tmp_path / "run", uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "point"), runs(), ids=[f"{kind}: {point}" for kind, point in runs()])
def test_runs_of_all_kinds_that_are_killed_anywhere_resume_to_the_byte(
    kind: Kind, point: str, model: Path, tmp_path: Path, uninterrupted: Any, counted: Callable[..., None]
) -> None:
    check(kind, point, model, tmp_path / "run", uninterrupted)
    counted("runs killed, then equal to the byte", f"{kind}: {point}")
    counted("kinds of runs", f"{kind}")
    counted("kinds of points", point)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_a_killed_run_of_a_model_whose_layers_carry_a_state_resumes_to_the_byte(
    strategy: str, tmp_path: Path, uninterrupted: Any
) -> None:
    kind = Kind("grpo", "together", strategy, "transformers", False)
    check(kind, "before an update", write_model("qwen3_5", tmp_path / "model"), tmp_path / "run", uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_a_killed_run_whose_prompts_have_pictures_resumes_to_the_byte(
    strategy: str, tmp_path: Path, uninterrupted: Any
) -> None:
    kind = Kind("pictures", "together", strategy, "transformers", False)
    model = write_tiny_vision_model(tmp_path / "model")
    check(kind, "before an update", model, tmp_path / "run", uninterrupted)


def test_a_run_is_killed_at_every_point() -> None:
    every = {point for kind in kinds() for point in points(kind)}
    assert {point for _, point in runs()} == every
    assert every >= POINTS.keys()
    assert len(every) >= 24
