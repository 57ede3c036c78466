"""A run as a whole: its end, and its results."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlflow import Batch, CausalLM, PerToken, UserError
from rlflow.algorithms import SFT
from rlflow.callbacks import Callback, EarlyStopping
from rlflow.models.tiny import write_tiny_model
from rlflow.rollout.engine import RankInfo
from rlflow.rollout.transformers import TransformersEngine
from rlflow.trainer import Trainer
from tests.controller.runs import ZERO2, Fit, OddCharacters, answers, failing_fit, failing_fit_of, fit, grpo, sums
from tests.data.list_source import Listed
from tests.ranks import RankPool


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "policy"
    return write_tiny_model(folder, hidden_size=64, intermediate_size=96, layers=1, max_position=256)


class Notes(Callback):
    """Keeps the order in which hooks are called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        self.called.append("start")

    def on_step_end(self, trainer: Trainer, module: Any, step: int, metrics: Any) -> None:
        self.called.append(f"step {step}")

    def on_validation_end(self, trainer: Trainer, module: Any, step: int, metrics: Any) -> None:
        self.called.append(f"validation {step}")

    def on_fit_end(self, trainer: Trainer, module: Any) -> None:
        self.called.append("end")


def test_the_run_folder_holds_what_the_documents_say(policy: Path, tmp_path: Path) -> None:
    summary = fit(Fit(grpo(policy), sums(8, 2, held_out=3), tmp_path / "run", settings={"max_steps": 2})).summary
    # No config.yaml: the run was made in Python.
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "code.jsonl",
        "graph.md",
        "metrics.jsonl",
        "metrics.csv",
        "samples.jsonl",
        "curves.png",
        "traces",
        "model",
        "summary.json",
        "logs",
        "rlflow.lock",
    }
    assert {path.name for path in (tmp_path / "run/traces").iterdir()} == {"rank0.jsonl"}
    assert json.loads((tmp_path / "run/summary.json").read_text()) == summary
    assert (summary["steps"], summary["problems"], list(summary["seconds"])) == (2, 3, ["run"])
    assert {"accuracy_before", "accuracy_after", "greedy_accuracy_before", "greedy_accuracy_after"} < summary.keys()


def has_ended(run: Fit) -> bool:
    """Whether this rank sees after `fit`, while rank 0 still draws curves, that the run has ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlflow.run.fit.draw_curves", lambda _: time.sleep(2))
        fit(run)
    return (run.folder / "summary.json").is_file()


def test_every_rank_sees_that_a_run_has_ended(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    assert ranks2.run(has_ended, Fit(grpo(policy), sums(8, 2), tmp_path, ZERO2)) == [True, True]


class Blocks(Callback):
    """Makes a folder where the summary is to be written."""

    def __init__(self, summary: Path) -> None:
        self.summary = summary

    def on_fit_end(self, trainer: Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            self.summary.mkdir()


def test_a_summary_that_cannot_be_written_is_named_on_all_ranks(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    run = Fit(grpo(policy), sums(8, 2), tmp_path, ZERO2, settings={"callbacks": [Blocks(tmp_path / "summary.json")]})
    for failed in ranks2.run(failing_fit, run):
        assert "cannot be written by rank 0" in failed.error


def test_the_summary_of_a_finished_run_that_is_started_again_is_the_same(policy: Path, tmp_path: Path) -> None:
    settings = {"max_steps": 1, "save_every_n_steps": 1, "ckpt_path": "auto"}
    whole, again = (fit(Fit(grpo(policy), sums(8, 2, held_out=3), tmp_path, settings=settings)) for _ in range(2))
    del whole.summary["seconds"], again.summary["seconds"]
    assert again.summary == whole.summary


def test_a_dev_run_leaves_the_real_one_s_folder_alone(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/model").touch()
    run = Fit(grpo(policy), sums(8, 2), tmp_path / "run", settings={"max_steps": 9, "fast_dev_run": True})
    assert fit(run).summary == {"steps": 2}
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run-dev"}
    assert {path.name for path in (tmp_path / "run-dev").iterdir()} == {"logs", "traces", "rlflow.lock"}


class Moves(Callback):
    """Goes to another folder after the first step."""

    def __init__(self, to: Path) -> None:
        self.to = to

    def on_step_end(self, trainer: Trainer, module: Any, step: int, metrics: Any) -> None:
        os.chdir(self.to)


def test_relative_folders_are_those_of_the_run_s_start_though_code_calls_chdir(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(policy, "sft/model")
    Path("sft/summary.json").write_text('{"seconds": {"sft": 7.0}}')
    Path("other").mkdir()
    settings = {"max_steps": 2, "save_every_n_steps": 1, "callbacks": [Moves(tmp_path / "other")]}
    summary = fit(Fit(grpo(Path("sft/model")), sums(8, 2), Path("runs/own"), settings=settings)).summary
    assert list(summary["seconds"]) == ["sft", "own"]
    assert [path.name for path in (tmp_path / "runs/own/checkpoint").iterdir()][-1:] == ["step-00000002"]
    assert (tmp_path / "runs/own/model").is_dir()
    assert list(Path(tmp_path / "other").iterdir()) == []
    assert f"left in {tmp_path}/runs/own/: model/" in capsys.readouterr().out


def test_a_model_in_the_run_s_own_folder_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "run/model", hidden_size=64, layers=1)
    with pytest.raises(UserError, match=r"`trainer.run_dir` is .*, and `actor` starts from .*run/model' in it"):
        fit(Fit(SFT(CausalLM(str(tmp_path / "run/model"))), answers((3,), 1), tmp_path / "run"))


def test_early_stopping_on_a_training_metric_ends_the_run_with_a_last_validation(policy: Path, tmp_path: Path) -> None:
    notes = Notes()
    stop = EarlyStopping("actor/loss", mode="min", stopping_threshold=1e9)
    settings = {"max_steps": 5, "callbacks": [notes, stop]}
    module = SFT(CausalLM(str(policy)), reward=OddCharacters(), max_response_length=4)
    data = answers((3, 4), 2)
    data.validation = data.train
    assert fit(Fit(module, data, tmp_path, settings=settings)).summary["steps"] == 1
    assert notes.called == ["start", "validation 0", "step 1", "validation 1", "end"]


def test_early_stopping_on_validation_ends_a_good_model_s_run_before_step_1(policy: Path, tmp_path: Path) -> None:
    stop = EarlyStopping("val/reward", mode="max", stopping_threshold=-1.0)
    run = Fit(grpo(policy), sums(8, 2, held_out=3), tmp_path, settings={"max_steps": 5, "callbacks": [stop]})
    assert fit(run).summary["steps"] == 0


def test_a_trainer_that_was_stopped_fits_again(policy: Path, tmp_path: Path) -> None:
    trainer = Trainer(str(tmp_path / "run"), max_steps=2, max_seconds=1e-9, accelerator="cpu", strategy="single")
    for _ in range(2):
        assert trainer.fit(SFT(CausalLM(str(policy))), answers((3, 4), 2))["steps"] == 1
    other = Trainer(str(tmp_path / "other"), max_steps=1, strategy=trainer.strategy, precision="bf16-true")
    assert other.fit(SFT(CausalLM(str(policy))), answers((3, 4), 2))["steps"] == 1


def test_metrics_are_recorded_every_so_many_steps_and_with_each_validation(policy: Path, tmp_path: Path) -> None:
    settings = {"max_steps": 5, "log_every_n_steps": 2, "val_check_interval": 3, "logger": "csv"}  # as its own
    fit(Fit(grpo(policy), sums(8, 2, held_out=3), tmp_path, settings=settings))
    recorded = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + len(recorded)
    assert recorded == [0, 2, 3, 4, 5]  # 0, 3 and 5 validate
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert sorted({sample["step"] for sample in samples}) == [2, 3, 4, 5]


def test_samples_are_recorded_as_often_as_they_are_to_be_between_metrics_too(policy: Path, tmp_path: Path) -> None:
    settings = {"max_steps": 5, "log_every_n_steps": 2, "log_samples_every_n_steps": 3}
    fit(Fit(grpo(policy), sums(8, 2), tmp_path, settings=settings))
    recorded = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert recorded == [2, 4, 5]  # 5 is the last
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {3}


def test_the_engine_of_a_policy_takes_the_place_of_rollout(policy: Path, tmp_path: Path) -> None:
    """The other is not set up, though it is the config's."""
    unused, own = Setups(), Setups(max_batch=256)
    usual = fit(Fit(grpo(policy), sums(4, 2), tmp_path / "usual"))
    settings = {"engines": {"actor": own}}
    found = fit(Fit(grpo(policy), sums(4, 2), tmp_path / "own", engine=unused, settings=settings))
    assert (unused.set_up, own.set_up) == (0, 1)
    assert all(torch.equal(found.weights[name], weight) for name, weight in usual.weights.items())


class Setups(TransformersEngine):
    """Counts how often it is set up."""

    set_up = 0

    def setup(self, model_path: str, rank_info: RankInfo) -> None:
        self.set_up += 1
        super().setup(model_path, rank_info)


class Sleeps(TransformersEngine):
    """Counts its awakenings."""

    asleep = False

    def sleep(self, keep_weights: bool = False) -> None:
        super().sleep(keep_weights)
        self.asleep = True

    def wake_up(self) -> None:
        self.asleep = False


class ChecksSleep(SFT):
    engine: Sleeps

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.engine.asleep
        super().load_state_dict(state)

    def actor_loss(self, batch: Batch) -> PerToken:
        assert self.engine.asleep or not torch.is_grad_enabled()  # as it validates
        return super().actor_loss(batch)


def test_the_engine_of_validation_sleeps_while_a_graph_without_rollout_trains(policy: Path, tmp_path: Path) -> None:
    def run(steps: int, **more: Any) -> Any:
        module = ChecksSleep(CausalLM(str(policy)), reward=OddCharacters(), max_response_length=4)
        module.engine = Sleeps()
        data = answers((3, 4), 2)
        data.validation = data.train
        settings = {"max_steps": steps, "val_check_interval": 2, **more}
        return fit(Fit(module, data, tmp_path, engine=module.engine, settings=settings)).summary["steps"]

    assert run(2, save_every_n_steps=1) == 2
    assert run(3, ckpt_path="last", save_every_n_steps=1) == 3


@pytest.mark.parametrize(
    ("what", "there", "here"),
    [
        ("plan", "plan: run       ref_logprobs: ranks 0-1", "plan: run       advantages: ranks 0-1"),
        ("seed", "seed: 1", "seed: 0"),
        ("steps", "steps: 3", "steps: 2"),
        ("rows", "training rows: 9", "training rows: 8"),
        ("prompts", "training data listed: ", "training data listed: "),
        ("answers", "validation data listed: ", "validation data listed: "),
    ],
)
def test_a_rank_of_another_run_is_refused_with_the_first_difference(
    what: str, there: str, here: str, policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    validation = Listed([{"question": "1+1=", "answer": "2"}])
    other_prompts, other_answers, with_answers = sums(8, 2), sums(8, 2), sums(8, 2)
    other_prompts.train = Listed([{"question": f"{i}+8="} for i in range(8)])
    with_answers.validation, other_answers.validation = validation, Listed([{"question": "1+1=", "answer": "3"}])
    data = with_answers if what == "answers" else sums(8, 2)
    ours = Fit(grpo(policy), data, tmp_path, ZERO2, settings={"max_steps": 2})
    theirs = {
        "prompts": Fit(grpo(policy), other_prompts, tmp_path, ZERO2, settings={"max_steps": 2}),
        "answers": Fit(grpo(policy), other_answers, tmp_path, ZERO2, settings={"max_steps": 2}),
        "plan": Fit(grpo(policy, kl_coef=0.1), sums(8, 2), tmp_path, ZERO2, settings={"max_steps": 2}),
        "seed": Fit(grpo(policy), sums(8, 2), tmp_path, ZERO2, settings={"max_steps": 2, "seed": 1}),
        "steps": Fit(grpo(policy), sums(8, 2), tmp_path, ZERO2, settings={"max_steps": 3}),
        "rows": Fit(grpo(policy), sums(9, 2), tmp_path, ZERO2, settings={"max_steps": 2}),
    }[what]
    for said in ranks2.run(failing_fit_of, [ours, theirs]):
        assert said.startswith(f"rank 1 was started for another run than rank 0: `{there}")
        assert f"` there and `{here}" in said
        assert "\n" not in said


def test_a_logger_of_lightnings_gets_every_step_once_though_the_run_is_resumed(policy: Path, tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path / "tb")
    settings = {"max_steps": 2, "save_every_n_steps": 1, "logger": logger}
    fit(Fit(grpo(policy), sums(8, 2), tmp_path / "run", settings=settings))
    more = {**settings, "max_steps": 3, "ckpt_path": "last", "logger": [TensorBoardLogger(tmp_path / "tb")]}
    fit(Fit(grpo(policy), sums(8, 2), tmp_path / "run", settings=more))
    (folder,) = (tmp_path / "tb/lightning_logs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    logged = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [each.step for each in events.Scalars("reward/mean")] == [1, 2, 3]
    for line, event in zip(logged, events.Scalars("reward/mean"), strict=True):
        assert event.value == pytest.approx(line["reward/mean"])
