"""Hooks with trainer and module, states by name, and the trainer as a callback of a real run sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlflow import CausalLM
from rlflow.algorithms import SFT
from rlflow.callbacks import Callback, EarlyStopping, ThroughputMonitor, Timer
from rlflow.callbacks.hooks import Callbacks
from rlflow.callbacks.profilers import SimpleProfiler
from rlflow.errors import UserError
from rlflow.loggers import CSVLogger
from rlflow.models.tiny import write_tiny_model
from rlflow.module import RLModule
from rlflow.trainer import Trainer
from tests.controller.runs import ZERO2, Fit, answers, fit, grpo, sums
from tests.ranks import RankPool


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "policy"
    return write_tiny_model(folder, hidden_size=32, intermediate_size=48, layers=1, max_position=128)


class Counts(Callback):
    """Steps that it saw; one state for each name."""

    def __init__(self, name: str = "a") -> None:
        self.name, self.steps = name, 0

    @property
    def state_key(self) -> str:
        return self._generate_state_key(name=self.name)

    def on_step_end(self, trainer: Any, module: RLModule, step: int, metrics: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]


class Sees(Callback):
    """Records the trainer's state at each hook."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def on_fit_start(self, trainer: Trainer, module: RLModule) -> None:
        self._note("start", trainer, module)

    def on_step_end(self, trainer: Trainer, module: RLModule, step: int, metrics: Any) -> None:
        assert all(trainer.callback_metrics[name] == value for name, value in metrics.items())
        self._note("step", trainer, module)

    def on_validation_end(self, trainer: Trainer, module: RLModule, step: int, metrics: Any) -> None:
        assert trainer.callback_metrics["val/reward"] == metrics["val/reward"]
        self._note("validation", trainer, module)

    def _note(self, hook: str, trainer: Trainer, module: RLModule) -> None:
        ranks = trainer.global_rank, trainer.world_size, trainer.is_global_zero
        self.seen.append((hook, trainer.global_step, trainer.current_epoch, *ranks, type(module).__name__))


def _seen(model: Path, folder: Path) -> list[tuple[Any, ...]]:
    """Three steps of two prompts, of three that there are: each step is an epoch."""
    sees = Sees()
    fit(Fit(grpo(model), sums(3, 2, held_out=2), folder, ZERO2, settings={"max_steps": 3, "callbacks": [sees]}))
    return sees.seen


def test_callbacks_see_step_epoch_rank_and_metrics_of_the_trainer(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    for rank, seen in enumerate(ranks2.run(_seen, policy, tmp_path)):
        here = (rank, 2, rank == 0, "RaggedGRPO")
        assert seen == [
            ("start", 0, 0, *here),
            ("validation", 0, 0, *here),
            ("step", 1, 0, *here),
            ("step", 2, 1, *here),
            ("step", 3, 2, *here),
            ("validation", 3, 2, *here),
        ]


def test_callbacks_may_come_and_go_between_a_run_and_its_resume(
    policy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(steps: int, *callbacks: Callback, **more: Any) -> None:
        settings = {"max_steps": steps, "save_every_n_steps": 1, "callbacks": callbacks, **more}
        fit(Fit(grpo(policy), sums(8, 2), tmp_path / "run", settings=settings))

    run(1, Counts("goes"), Counts("stays"))
    state = json.loads((tmp_path / "run/checkpoint/step-00000001/state.json").read_text())["state"]
    assert state["callbacks"] == {
        "Counts{'name': 'goes'}": {"steps": 1},
        "Counts{'name': 'stays'}": {"steps": 1},
    }
    capfd.readouterr()
    stays, comes = Counts("stays"), Counts("comes")
    run(2, comes, stays, Sees(), ckpt_path="last")
    assert (stays.steps, comes.steps) == (2, 1)
    told = [line for line in capfd.readouterr().out.splitlines() if "of the callback" in line]
    assert told == [
        "the checkpoint has a state of the callback Counts{'name': 'goes'}, which this run does not have; it is"
        " dropped",
        "the checkpoint has no state of the callback Counts{'name': 'comes'}, which starts without one",
    ]


class Before(Callback):
    """A callback in an older form."""

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None: ...  # type: ignore[override]


class TakesAll(Callback):
    def on_step_end(self, *arguments: Any) -> None: ...


def test_a_hook_that_takes_other_arguments_is_refused_with_the_line_to_write() -> None:
    line = (
        "`on_step_end(self, trainer, step, metrics)` of the callback Before does not take what it is called with; write"
        " `def on_step_end(self, trainer, module, step, metrics)`"
    )
    with pytest.raises(UserError) as refusal:
        Trainer(callbacks=[TakesAll(), Before()])
    assert str(refusal.value) == line


def test_two_callbacks_whose_states_have_one_name_are_refused() -> None:
    Trainer(callbacks=[Counts("a"), Counts("b"), Sees(), Sees(), EarlyStopping("x", patience=1)])
    with pytest.raises(UserError, match=r"2 callbacks have the `state_key` \"Counts\{'name': 'a'\}\""):
        Trainer(callbacks=[Counts("a"), Counts("b"), Counts("a")])


def test_an_early_stopping_is_found_again_by_what_it_monitors() -> None:
    def both(first: str, second: str) -> tuple[EarlyStopping, EarlyStopping]:
        return EarlyStopping(first, patience=9), EarlyStopping(second, patience=9)

    trainer, module = Trainer(), RLModule()
    saved = both("val/a", "val/b")
    Callbacks(saved, trainer, module).call(Callback.on_validation_end, 0, {"val/a": 1.0, "val/b": 2.0})
    states = json.loads(json.dumps(Callbacks(saved, trainer, module).state_dict()))
    turned = both("val/b", "val/a")
    assert Callbacks(turned, trainer, module).load_state_dict(states) == []
    assert [callback.state_dict()["best"] for callback in turned] == [2.0, 1.0]


def test_a_state_that_is_not_json_is_refused_with_the_callback_that_has_it() -> None:
    counts = Counts()
    counts.steps = {1, 2}  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"callback Counts\{'name': 'a'\} cannot be saved \(Object of type set"):
        Callbacks([counts], Trainer(), RLModule()).state_dict()


class Lasted(Callback):
    """Steps per second of each step, and the seconds since the run's start."""

    def __init__(self) -> None:
        self.rates: list[tuple[float, float]] = []

    def on_step_end(self, trainer: Any, module: RLModule, step: int, metrics: dict[str, float]) -> None:
        self.rates.append((metrics["train/batches_per_sec"], metrics["time/elapsed"]))


def test_callbacks_start_again_with_each_fit_of_a_trainer(policy: Path, tmp_path: Path) -> None:
    timer, early, lasted = Timer({"microseconds": 1}), EarlyStopping("actor/lr"), Lasted()
    throughput, profiler = ThroughputMonitor(window_size=2), SimpleProfiler()
    callbacks = [timer, early, throughput, lasted, profiler]
    trainer = Trainer(str(tmp_path / "run"), max_steps=2, accelerator="cpu", callbacks=callbacks)
    for _ in range(2):
        assert trainer.fit(SFT(CausalLM(str(policy))), answers((3, 4), 2))["steps"] == 1
        assert timer.time_elapsed() == lasted.rates[-1][1]
        assert early.state_dict()["looks_without_better"] == 0
        assert lasted.rates[-1][0] == pytest.approx(1 / lasted.rates[-1][1])
        assert next(line.split()[2] for line in profiler.table() if line.startswith("step ")) == "1"


@pytest.mark.parametrize("monitor", ["val/accuracy", "val_greedy/accuracy"])
def test_a_metric_of_validation_is_not_monitored_without_one(monitor: str) -> None:
    trainer = Trainer(callbacks=EarlyStopping(monitor))
    with pytest.raises(UserError, match=f"'{monitor}', and `data.validation` is not set, so nothing is validated"):
        trainer.fit(RLModule(), [{"question": "1+1="}])


def test_logger_is_the_first_of_loggers() -> None:
    first, second = CSVLogger(), CSVLogger()
    assert (Trainer(logger=first).logger, Trainer(logger=first).loggers) == (first, [first])
    assert Trainer(logger=[second, first]).logger is second
    assert Trainer().logger is None
