"""A run that is interrupted anywhere and resumed has the results of an uninterrupted run: equal to the byte.

What is compared: weights, the optimizer's state and all else of the last checkpoints, models, `metrics.jsonl` without
times, and `samples.jsonl`. Runs whose processes are killed are in `tests/faults/test_exact_resume.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.callbacks import Callback
from rlflow.models.tiny import write_tiny_model
from tests.controller.runs import Fit, trainer_of
from tests.faults.killed_runs import Kind, content, fit_to_the_end
from tests.ranks import RankPool
from tests.slow import slow_but

STEPS = 3
EVERYWHERE = ("reduce", "end")  # places that all ranks come to together, wherever roles live
TOGETHER = ("load", "train", *EVERYWHERE)


@dataclass(frozen=True)
class Case:
    """A run that is interrupted once.

    Attributes:
        kind: Algorithm, place of its roles, strategy, and so on.
        every: Steps from one checkpoint to the next.
        step: Steps that are done when it is interrupted; a checkpoint is there by then.
        at: The task of the next step that it is interrupted before, on all ranks; or `end`, the end of that step.
        ahead: Steps that generation is ahead of training, where steps overlap.
    """

    kind: Kind
    every: int
    step: int
    at: str
    ahead: int = 1

    def __str__(self) -> str:
        ahead = f" {self.ahead} ahead" if self.kind.place == "overlapping" else ""
        return f"{self.kind}{ahead}: saved every {self.every}, interrupted after {self.step} at {self.at}"

    def run(self, model: Path, folder: Path, **more: Any) -> Fit:
        """The run."""
        ahead = {"max_staleness": self.ahead} if self.kind.place == "overlapping" else {}
        return self.kind.run(model, folder, max_steps=STEPS, save_every_n_steps=self.every, **ahead, **more)


class Interruption(Exception):
    """Ends a run on all ranks."""


class Interrupts(Callback):
    """Raises at the place of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def on_task_start(self, trainer: Any, module: Any, task: str, step: int) -> None:
        if (task.split()[0], step) == (self.case.at, self.case.step + 1):
            raise Interruption

    def on_step_end(self, trainer: Any, module: Any, step: int, metrics: Any) -> None:
        if ("end", step) == (self.case.at, self.case.step + 1):
            raise Interruption


def fit_until_interrupted(run: Fit, case: Case) -> None:
    """Train up to the place of the case."""
    with pytest.raises(Interruption):
        trainer_of(run, run.strategy(), [Interrupts(case)]).fit(run.module, run.data)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    algorithm = draw(st.sampled_from(["grpo", "ppo", "dapo", "partial", "turns", "cut turns", "dpo", "sft"]))
    generates = algorithm not in ("dpo", "sft")
    place = draw(st.sampled_from(["one", "together", *(("apart", "overlapping") if generates else ())]))
    strategy = draw(st.sampled_from(["zero2", "zero3", "fsdp", *(("single",) if place == "one" else ())]))
    every = draw(st.integers(1, STEPS - 1))
    step = draw(st.integers(every, STEPS - 1))
    at = draw(st.sampled_from(EVERYWHERE if place in ("apart", "overlapping") else TOGETHER))
    kind = Kind(algorithm, place, strategy, "transformers", async_save=draw(st.booleans()))
    return Case(kind, every, step, at, ahead=draw(st.integers(1, 2)))


# Four, and the groups that their checkpoints carry over.
QUICK = {
    Case(Kind("ppo", "apart", "zero2", "transformers", False), 1, 2, "reduce"): (),
    Case(Kind("dapo", "together", "fsdp", "transformers", True), 2, 2, "train"): ("surplus",),
    Case(Kind("cut turns", "overlapping", "zero3", "transformers", False), 1, 1, "end"): (
        "unfinished",
        "step-00000001",
    ),
    Case(Kind("dpo", "one", "single", "transformers", True), 1, 1, "load"): (),
}


@pytest.fixture(scope="module")
def check(ranks1: RankPool, ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    model = write_tiny_model(tmp_path_factory.mktemp("interrupted") / "tiny", hidden_size=128, layers=1)

    def check(case: Case, *carried_over: str) -> None:
        ranks = ranks1 if case.kind.ranks == 1 else ranks2
        folder = tmp_path_factory.mktemp("run")
        ranks.run(fit_to_the_end, case.run(model, folder / "whole"), timeout_s=240)
        ranks.run(fit_until_interrupted, case.run(model, folder / "parts"), case, timeout_s=240)
        last = max((folder / "parts/checkpoint").iterdir())
        assert last.name == f"step-{case.step // case.every * case.every:08d}"
        for name in carried_over:  # else the case does not show that groups come back
            assert (last / f"{name}.json").is_file(), name
        ranks.run(fit_to_the_end, case.run(model, folder / "parts", ckpt_path="last"), timeout_s=240)
        whole, parts = content(folder / "whole"), content(folder / "parts")
        assert sorted(parts) == sorted(whole)
        assert [name for name in whole if parts[name] != whole[name]] == []

    return check


@pytest.mark.parametrize(("case", "carried_over"), slow_but([*QUICK.items()][2:], QUICK.items()), ids=map(str, QUICK))
def test_a_run_that_was_interrupted_is_the_run_that_was_not(
    case: Case, carried_over: tuple[str, ...], check: Callable[..., None]
) -> None:
    check(case, *carried_over)


@pytest.mark.slow
@given(case=cases())
@settings(max_examples=40, derandomize=True)
def test_runs_of_all_kinds_that_were_interrupted_anywhere_are_those_that_were_not(
    case: Case, check: Callable[..., None]
) -> None:
    check(case)
