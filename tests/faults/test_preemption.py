"""Signals at each task of a step: the saved state, and the resumed run, which equals the uninterrupted one."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.callbacks import Callback
from rlflow.errors import Preempted
from rlflow.models.tiny import write_tiny_model
from rlflow.process import preemption
from rlflow.trainer import Trainer
from tests.controller.runs import ZERO2, Fit, Result, fit, grpo, sums, trainer_of
from tests.ranks import RankPool

pytestmark = pytest.mark.row("preemption")

STEPS, AT = 4, 2  # of the run; done before the signal comes
GIVEN_UP, FINISHED = AT, AT + 1


class Sends(Callback):
    """Sends this process a signal before the first task of a step whose text begins so, on some ranks.

    Args:
        number: Number of the signal.
        task: Task as `rlflow graph` prints it, or the hook of a callback.
        ranks: Ranks that receive it.
        step: The step, from 0.
    """

    def __init__(self, number: int, task: str, ranks: tuple[int, ...], step: int = AT) -> None:
        self.number, self.task, self.ranks, self.step = number, task, ranks, step
        self.error: BaseException | None = None

    def on_task_start(self, trainer: Trainer, module: Any, task: str, step: int) -> None:
        if step == self.step + 1 and " ".join(task.split()).startswith(self.task):
            self._send(trainer)

    def on_node_end(self, trainer: Trainer, module: Any, node_id: str) -> None:
        if trainer.global_step == self.step and self.task == f"after {node_id}":
            self._send(trainer)

    def on_step_end(self, trainer: Trainer, module: Any, step: int, metrics: Any) -> None:
        if step == self.step + 1 and self.task == "step end":
            self._send(trainer)

    def on_validation_end(self, trainer: Trainer, module: Any, step: int, metrics: Any) -> None:
        if step == self.step and self.task == "validation":
            self._send(trainer)

    def on_exception(self, trainer: Trainer, module: Any, error: BaseException) -> None:
        self.error = error

    def _send(self, trainer: Trainer) -> None:
        self.task = "sent"
        if trainer.global_rank in self.ranks:
            os.kill(os.getpid(), self.number)
            until = time.monotonic() + 10
            while not preemption.received() and time.monotonic() < until:
                time.sleep(0.001)


def preempted(run: Fit, sends: Sends) -> str:
    """Run until the signal ends it on this rank; the line."""
    with pytest.raises(Preempted) as raised, preemption.handled(until_exit=False):
        trainer_of(run, run.strategy(), [sends]).fit(run.module, run.data)
    faulthandler.register(signal.SIGUSR1)  # as ranks of tests have it
    assert sends.error is raised.value
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return str(raised.value)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preempted") / "policy"
    return write_tiny_model(folder, hidden_size=64, intermediate_size=96, layers=1, max_position=256)


def small(policy: Path, folder: Path, **settings: Any) -> Fit:
    """A run of two ranks that validates every other step."""
    every = {"max_steps": STEPS, "save_every_n_steps": 9, "val_check_interval": 2, "ckpt_path": "auto", **settings}
    return Fit(grpo(policy, max_response_length=6), sums(8, 2, held_out=2), folder, ZERO2, settings=every)


@pytest.fixture(scope="module")
def whole(policy: Path, tmp_path_factory: pytest.TempPathFactory, ranks2: RankPool) -> list[Result]:
    """The run that no signal ends, by rank."""
    return ranks2.run(fit, small(policy, tmp_path_factory.mktemp("whole")))


def numbers(step: dict[str, float]) -> dict[str, float]:
    return {name: x for name, x in step.items() if not name.startswith("time/")}


def goes_on(run: Fit, saved: int, whole: list[Result], ranks: RankPool) -> None:
    """The run that continues is, from the step where it was ended, the one that was not."""
    for rest, expected in zip(ranks.run(fit, run), whole, strict=True):
        assert [numbers(step) for step in rest.steps] == [numbers(step) for step in expected.steps[saved:]]
        assert rest.weights.keys() == expected.weights.keys()
        assert all(torch.equal(weight, expected.weights[name]) for name, weight in rest.weights.items())


def ends_and_goes_on(run: Fit, sends: Sends, saved: int, whole: list[Result], ranks: RankPool) -> None:
    name = signal.Signals(sends.number).name
    folder = run.folder / f"checkpoint/step-{saved:08d}"
    line = f"ended by {name}: {folder} is saved; continue with the same command"
    assert ranks.run(preempted, run, sends) == [line] * ranks.world_size
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    goes_on(run, saved, whole, ranks)
    records = [path.name for path in run.folder.parent.iterdir() if path.name.startswith(run.folder.name)]
    assert records == [run.folder.name]  # nothing was moved away


FEW = [
    (signal.SIGTERM, "run rollout", (1,), GIVEN_UP),
    (signal.SIGINT, "reduce", (0, 1), FINISHED),
]
EVERY_TASK = [
    (number, task, ranks, saved)
    for number, ranks in ((signal.SIGUSR1, (0,)), (signal.SIGTERM, (1,)), (signal.SIGINT, (0, 1)))
    for task, saved in (
        ("load", GIVEN_UP),
        ("sync", GIVEN_UP),
        ("run rollout", GIVEN_UP),
        ("after rollout", GIVEN_UP),
        ("run rewards", GIVEN_UP),
        ("run advantages", GIVEN_UP),
        ("train", GIVEN_UP),
        ("reduce", FINISHED),
        ("step end", FINISHED),
        ("validation", GIVEN_UP),
    )
]


@pytest.mark.parametrize(
    ("number", "task", "receive", "saved"),
    [*FEW, *(pytest.param(*each, marks=pytest.mark.slow) for each in EVERY_TASK if each not in FEW)],
)
def test_a_signal_at_a_task_ends_all_ranks_alike_and_the_run_resumes_to_the_byte(
    number: signal.Signals,
    task: str,
    receive: tuple[int, ...],
    saved: int,
    policy: Path,
    whole: list[Result],
    tmp_path: Path,
    ranks2: RankPool,
    counted: Callable[..., None],
) -> None:
    ends_and_goes_on(small(policy, tmp_path / "run"), Sends(number, task, receive), saved, whole, ranks2)
    counted("signals", number.name)
    counted("tasks of a step", task)
    counted("pairs of them, on one rank or both: ended, then equal to the byte", f"{number}, {task}, {receive}")
