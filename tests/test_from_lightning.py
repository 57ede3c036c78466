"""Names of Lightning do what Lightning's documentation says, or are refused in one line.

`tests/callbacks/test_against_lightning.py` compares with Lightning itself.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlflow import CausalLM, PerSample, RLModule, Trainer, UserError, node
from rlflow.algorithms import GRPO
from rlflow.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    SampleTable,
    ThroughputMonitor,
    Timer,
)
from rlflow.commands.fit import read_fit
from rlflow.lightning_names import METHOD_ARGUMENTS, TRAINER_ARGUMENTS
from rlflow.loggers import Logger
from rlflow.models.tiny import write_tiny_model
from rlflow.strategies import DeepSpeedStrategy, FSDPStrategy, SingleProcess
from tests.controller.runs import RaggedGRPO, sums


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "policy"
    return write_tiny_model(folder, hidden_size=32, intermediate_size=48, layers=1, max_position=128)


class Mine(RaggedGRPO):
    """An algorithm as Lightning's users write one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.save_hyperparameters(ignore="reward")
        self.save_hyperparameters({"note": "first"})
        self.seen = 0

    def configure_optimizers(self) -> Any:
        matrices = [each for each in self.actor.parameters() if each.dim() > 1]
        others = [each for each in self.actor.parameters() if each.dim() < 2]
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 1e-4}]
        return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)

    def choose_nothing(self) -> None:
        self.seen += 1

    @node
    def logs(self, rewards: PerSample) -> None:
        self.log_dict({"mine/shortest": rewards, "mine/shown": rewards - 100}, prog_bar=True, reduce_fx="max")
        self.log("mine/for_callbacks", rewards, logger=False, reduce_fx="sum")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


class Sums(Callback):
    """Keeps a metric that no logger records."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_step_end(self, trainer: Any, module: Any, step: int, metrics: Any) -> None:
        self.sums.append(metrics["mine/for_callbacks"])


class Configs(Logger):
    """Keeps the config that it is given."""

    def log_metrics(self, metrics: Any, step: int) -> None:
        pass

    def log_config(self, config: Any) -> None:
        self.config = config


def length(completions: list[str], **columns: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


def test_a_run_takes_callbacks_a_logger_and_a_profiler_in_lightning_s_names(
    policy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    callbacks = [
        saved := ModelCheckpoint(monitor="time/elapsed", save_top_k=1, every_n_train_steps=1),
        Timer("00:01:00:00"),
        LearningRateMonitor(log_momentum=True, log_weight_decay=True),
        ThroughputMonitor(window_size=2),
        SampleTable(every_n_steps=2, n=3),
        seen := Sums(),
    ]
    module = Mine(CausalLM(str(policy)), reward=length, group_size=2, max_response_length=5)
    module.choose_nothing()
    run = tmp_path / "run"
    logger = Configs()
    given = {"max_steps": 3, "callbacks": callbacks, "profiler": "simple", "accelerator": "cpu", "logger": logger}
    trainer = Trainer(str(run), **given)  # type: ignore[arg-type]
    assert (trainer.checkpoint_callback, saved.best_model_path) == (saved, "")
    trainer.fit(module, sums(8, 2))
    assert (logger.config["group_size"], logger.config.get("actor")) == (2, None)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for step in steps:
        assert (step["actor/lr/pg1"], step["actor/lr/pg2"]) == (1e-3, 1e-4)
        assert (step["actor/weight_decay/pg1"], step["actor/weight_decay/pg2"]) == (0.1, 0.0)
        assert (step["actor/momentum/pg1"], step["actor/momentum/pg2"]) == (0.9, 0.9)
        assert step["mine/shown"] == step["mine/shortest"] - 100
        assert "mine/for_callbacks" not in step
    assert "mine/for_callbacks" not in (run / "metrics.csv").read_text()
    assert len(seen.sums) == 3
    assert seen.sums[-1] == pytest.approx(4 * steps[-1]["reward/mean"])  # two prompts with two responses
    # Over a window of two steps, between their ends: 1 step, 4 samples, and the tokens of the second.
    seconds = steps[2]["time/elapsed"] - steps[1]["time/elapsed"]
    assert steps[2]["train/batches_per_sec"] == pytest.approx(1 / seconds)
    assert steps[2]["train/samples_per_sec"] == pytest.approx(4 / seconds)
    assert steps[2]["train/items_per_sec"] == pytest.approx(steps[2]["rollout/tokens"] / seconds)
    first, last = (str(run / "checkpoint" / f"step-{step:08}") for step in (1, 3))  # the shortest time is the best
    assert (saved.best_model_path, saved.last_model_path) == (first, last)
    assert saved.best_model_score == steps[0]["time/elapsed"]
    assert list(saved.best_k_models.values()) == [step["time/elapsed"] for step in steps]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [each["step"] for each in samples] == [2, 2, 2]
    assert 0 < callbacks[1].time_elapsed() < 3600  # type: ignore[attr-defined]
    printed = capfd.readouterr().out
    assert (
        f"step 3/3  mine/shortest {steps[2]['mine/shortest']:.4g}  mine/shown {steps[2]['mine/shown']:.4g}  r"
        in printed
    )
    assert re.search(r"^step +\d+\.\d{3} +3 +\d+\.\d\d +100\.0%$", printed, re.MULTILINE)
    assert re.search(r"^rollout +\d+\.\d{3} +3 ", printed, re.MULTILINE)
    # The best is the first, and the last two stay.
    assert sorted(path.name[-1] for path in (run / "checkpoint").iterdir()) == ["1", "2", "3"]
    the_hyperparameters_and_the_state_come_back(run, policy)
    best = {"ckpt_path": "best", "monitor": "time/elapsed", "save_top_k": 1, "save_every_n_steps": 9}
    trainer = Trainer(str(run), max_steps=2, accelerator="cpu", **best)  # type: ignore[arg-type]
    trainer.fit(Mine(CausalLM(str(policy)), reward=length, group_size=2, max_response_length=5), sums(8, 2))
    assert "step-00000001 after step 1" in "".join(capfd.readouterr())


def the_hyperparameters_and_the_state_come_back(run: Path, policy: Path) -> None:
    assert json.loads((run / "hparams.json").read_text())["group_size"] == 2
    with pytest.warns(UserWarning, match="has no config, so settings of `actor`, .* are the defaults; set them in"):
        loaded = Mine.load_from_checkpoint(run, reward=length)
    assert (loaded.group_size, loaded.hparams["max_response_length"], loaded.seen) == (2, 5, 1)
    assert loaded.actor.model == str(run / "model")
    (*_, last) = sorted((run / "checkpoint").iterdir())
    with pytest.raises(UserError, match=r"was given `group_sise`, which Mine does not take; .* Did you mean"):
        Mine.load_from_checkpoint(last, reward=length, group_sise=4)
    exported = Mine.load_from_checkpoint(last, reward=length, group_size=4)
    assert exported.group_size == 4
    paths = (Path(loaded.actor.model), Path(exported.actor.model), policy)
    of_run, of_checkpoint, before = (torch.cat([each.flatten() for each in weights_in(path)]) for path in paths)
    assert torch.equal(of_run, of_checkpoint)
    assert not torch.equal(of_run, before)


def weights_in(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return [weight for _, weight in sorted(load_file(folder / "model.safetensors").items())]


def test_the_module_of_a_run_with_a_config_has_its_settings_and_the_run_s_weights(policy: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    (tmp_path / "config.yaml").write_text(CONFIG.replace("rows.jsonl", str(tmp_path / "rows.jsonl")))
    loaded = RLModule.load_from_checkpoint(tmp_path)
    assert isinstance(loaded, GRPO)
    assert (loaded.group_size, loaded.actor.model) == (2, str(tmp_path / "model"))
    assert type(loaded.reward).__name__ == "ExactMatch"
    other = GRPO.load_from_checkpoint(tmp_path, group_size=4, actor=CausalLM(str(policy)))
    assert (other.group_size, other.actor.model) == (4, str(policy))
    with pytest.raises(UserError, match="trained GRPO, not Mine; load it by that class"):
        Mine.load_from_checkpoint(tmp_path)


class Doubled(RLModule):
    """Keeps what it makes of its arguments under other names, or changes it."""

    def __init__(self, actor: CausalLM, coef: float = 1.0, group_size: int = 2) -> None:
        self.actor, self.factor, self.group_size = actor, 2 * coef, 2 * group_size


class Remembering(Doubled):
    def __init__(self, actor: CausalLM, coef: float = 1.0, group_size: int = 2) -> None:
        super().__init__(actor, coef, group_size)
        self.save_hyperparameters()


def test_arguments_of_a_config_that_a_module_does_not_keep_are_not_lost_in_silence(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", hidden_size=8, intermediate_size=8, layers=1, heads=2)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    given = f"{{class_path: {__name__}.Doubled, init_args: {{actor: tiny, coef: 0.5, group_size: 4}}}}"
    config = f"module: {given}\ndata: {{train: {tmp_path}/rows.jsonl}}\ntrainer: {{max_steps: 1, accelerator: cpu}}\n"
    (tmp_path / "config.yaml").write_text(config)
    assert Doubled.load_from_checkpoint(tmp_path).factor == 1.0
    with pytest.raises(UserError, match=r"Doubled has no attribute `coef`, .* give `coef` to `load_from_checkpoint`"):
        Doubled.load_from_checkpoint(tmp_path, group_size=3)
    (tmp_path / "config.yaml").write_text(config.replace("Doubled", "Remembering"))
    loaded = Remembering.load_from_checkpoint(tmp_path, actor=CausalLM("tiny"))
    assert (loaded.factor, loaded.group_size) == (1.0, 8)


def test_hyperparameters_that_a_parent_kept_are_left_out_by_ignore() -> None:
    class Parent(RLModule):
        def __init__(self, lr: float, size: int) -> None:
            self.save_hyperparameters()

    class Child(Parent):
        def __init__(self, lr: float, size: int) -> None:
            super().__init__(lr, size)
            self.save_hyperparameters(ignore=["size"])

    assert Child(0.1, 7).hparams == {"lr": 0.1}


class Keeps(RLModule):
    def __init__(self, lr: float, given: Any) -> None:
        self.save_hyperparameters(given)


def test_hyperparameters_of_a_namespace_are_its_attributes() -> None:
    assert Keeps(0.1, Namespace(size=3)).hparams == {"size": 3}


def test_hyperparameters_are_those_of_a_class_and_of_its_parent() -> None:
    class Parent(RLModule):
        def __init__(self, lr: float, names: tuple[str, ...] = ("a",)) -> None:
            self.save_hyperparameters()

    class Child(Parent):
        def __init__(self, size: int, **others: Any) -> None:
            super().__init__(0.5)
            self.save_hyperparameters("size", {"more": 1})

    assert Parent(0.1).hparams == {"lr": 0.1, "names": ("a",)}
    assert Child(7, depth=2).hparams == {"lr": 0.5, "names": ("a",), "size": 7, "depth": 2, "more": 1}
    assert Child(7).hparams.size == 7  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("precision", "strategy", "dtype"),
    [
        ("bf16-mixed", FSDPStrategy, torch.bfloat16),
        ("bf16", DeepSpeedStrategy, torch.bfloat16),
        (16, FSDPStrategy, torch.float16),
        ("bf16-true", SingleProcess, torch.bfloat16),
        ("32-true", SingleProcess, torch.float32),
        (64, SingleProcess, torch.float64),
    ],
)
def test_a_precision_is_that_of_the_strategy(precision: str | int, strategy: Any, dtype: torch.dtype) -> None:
    trainer = Trainer(precision=precision, strategy=strategy())
    assert isinstance(trainer.strategy, strategy)
    assert trainer.strategy.dtype == dtype


def test_a_mixed_precision_on_one_device_keeps_float32_weights() -> None:
    assert isinstance(Trainer(precision="bf16-mixed").strategy, FSDPStrategy)
    assert isinstance(Trainer(precision="bf16-true").strategy, SingleProcess)


def test_auto_devices_are_one_on_the_cpu_and_all_gpus() -> None:
    assert Trainer(devices="auto", accelerator="cpu").devices == 1
    assert Trainer(devices=-1).devices == max(1, torch.cuda.device_count())
    assert Trainer(accelerator="gpu").accelerator == "cuda"


def test_a_number_for_fast_dev_run_is_its_steps() -> None:
    assert [Trainer(fast_dev_run=each).max_steps for each in (True, 3)] == [2, 3]


class Uncalled(Logger):
    """A logger of a run that is not to be logged."""

    def log_metrics(self, metrics: Any, step: int) -> None:
        raise AssertionError("a dev run has no loggers")


class Done(Callback):
    """Keeps what was done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def on_weight_sync(self, trainer: Any, module: Any, policy: str, version: int) -> None:
        self.done.append("sync")

    def on_node_end(self, trainer: Any, module: Any, node_id: str) -> None:
        self.done.append(node_id)

    def on_step_end(self, trainer: Any, module: Any, step: int, metrics: Any) -> None:
        assert metrics["actor/grad_norm"] > 0
        self.done.append("update")

    def on_validation_end(self, trainer: Any, module: Any, step: int, metrics: Any) -> None:
        self.done.append("validation")


def short(policy: Path) -> RaggedGRPO:
    return RaggedGRPO(CausalLM(str(policy)), reward=length, group_size=2, max_response_length=5)


def test_a_dev_run_does_all_of_a_step_and_leaves_no_checkpoint(policy: Path, tmp_path: Path) -> None:
    done = Done()
    given = {"fast_dev_run": 3, "save_every_n_steps": 1, "logger": Uncalled(), "callbacks": done, "accelerator": "cpu"}
    summary = Trainer(str(tmp_path / "run"), max_steps=50, **given).fit(short(policy), sums(8, 2, held_out=2))  # type: ignore[arg-type]
    assert (summary["steps"], summary["problems"]) == (3, 2)
    nodes = ["rollout", "rewards", "advantages", "update"]
    # Of the first weights the validation before training syncs.
    assert done.done == ["sync", "validation", *nodes, "sync", *nodes, "sync", *nodes, "sync", "validation"]
    assert [each.name for each in tmp_path.iterdir()] == ["run-dev"]
    assert not (tmp_path / "run-dev/checkpoint").exists()


def test_epochs_end_a_run_whose_steps_and_updates_are_shown(
    policy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = short(policy)
    module.actor.samples_per_update = 2
    summary = Trainer(str(tmp_path), max_epochs=2, accelerator="cpu").fit(module, sums(7, 2))
    assert summary["steps"] == 2 * (7 // 2)  # of full batches
    shown = capfd.readouterr().out
    assert "ranks 1, steps 6, training rows 7" in shown
    assert "actor: 2 update(s) per step of 2 samples" in shown  # of two prompts with two samples


def test_the_seed_of_a_run_decides_what_the_engine_samples(policy: Path, tmp_path: Path) -> None:
    def sampled(name: str, seed: int) -> list[str]:
        given = {"max_steps": 1, "seed": seed, "accelerator": "cpu", "log_samples": 8}
        module = RaggedGRPO(CausalLM(str(policy)), reward=length, group_size=8, max_response_length=5)
        Trainer(str(tmp_path / name), **given).fit(module, sums(1, 1))  # type: ignore[arg-type]  # a row: of one order
        return [json.loads(line)["response"] for line in (tmp_path / name / "samples.jsonl").read_text().splitlines()]

    first = sampled("first", 1)
    assert len(first) == 8
    assert sampled("again", 1) == first
    assert sampled("other", 2) != first


def test_checkpoints_by_model_checkpoint_are_settings_of_the_trainer() -> None:
    trainer = Trainer(
        callbacks=[
            ModelCheckpoint(
                monitor="val/reward",
                mode="max",
                save_top_k=3,
                save_last=True,
                every_n_train_steps=5,
                train_time_interval=timedelta(minutes=30),
            )
        ]
    )
    found = trainer.settings
    assert (found.monitor, found.mode, found.save_top_k, found.save_last) == ("val/reward", "max", 3, 2)
    assert (found.save_every_n_steps, found.save_every_seconds) == (5, 1800.0)
    every = ModelCheckpoint(monitor="val/reward", save_top_k=-1, every_n_train_steps=1)  # of which one is `best`
    assert (Trainer(callbacks=every).save_top_k, Trainer(callbacks=every).monitor) == (-1, "val/reward")
    assert Trainer(callbacks=ModelCheckpoint(save_top_k=-1), val_check_interval=7).settings.save_every_n_steps == 7


def test_the_best_checkpoint_is_the_later_of_equal_ones_and_has_a_value() -> None:
    for mode, best in (("max", "c"), ("min", "b")):
        callback = ModelCheckpoint(monitor="val/reward", mode=mode, every_n_train_steps=1)
        trainer = Trainer(callbacks=callback)
        trainer.checkpoints = {"a": 0.5, "b": 0.1, "c": 0.5, "d": math.nan, "e": None}
        callback.on_fit_end(trainer, RLModule())
        assert (callback.best_model_path, callback.best_model_score) == (best, trainer.checkpoints[best])
        assert callback.last_model_path == "e"
        assert callback.best_k_models == {"a": 0.5, "b": 0.1, "c": 0.5}
    for monitor, best in ((None, "b"), ("val/reward", "")):  # the last one; or none, since no value is known
        callback = ModelCheckpoint(monitor=monitor, every_n_train_steps=1)
        trainer = Trainer(callbacks=callback)
        trainer.checkpoints = {"a": None, "b": None}
        callback.on_fit_end(trainer, RLModule())
        assert (callback.best_model_path, callback.best_model_score) == (best, None)


def test_a_timer_counts_the_runs_that_a_run_resumes() -> None:
    trainer, before, after = Trainer(), Timer("00:00:01:40"), Timer({"seconds": 100})
    before.on_step_end(trainer, RLModule(), 1, {"time/elapsed": 60.0})
    assert not trainer.should_stop
    after.load_state_dict(before.state_dict())
    after.on_step_end(trainer, RLModule(), 2, {"time/elapsed": 39.0})
    assert (trainer.should_stop, after.time_elapsed(), after.time_remaining()) == (False, 99.0, 1.0)
    after.on_step_end(trainer, RLModule(), 3, {"time/elapsed": 40.0})
    assert trainer.should_stop


def test_a_timer_whose_time_is_over_ends_the_run_that_resumes_before_a_step() -> None:
    trainer, timer = Trainer(), Timer(timedelta(seconds=5), verbose=False)
    timer.load_state_dict({"time_elapsed": 5.0})
    trainer.global_step = 1
    timer.on_fit_start(trainer, RLModule())
    assert trainer.should_stop


def test_throughput_counts_what_nodes_generate_and_no_other_tokens() -> None:
    metrics = {"time/elapsed": 2.0, "rollout/tokens": 20.0, "rollout/responses": 4.0, "my/tokens": 7.0}
    ThroughputMonitor().on_step_end(Trainer(), RLModule(), 1, metrics)
    # 4 samples and 20 tokens in 2 seconds
    assert (metrics["train/samples_per_sec"], metrics["train/items_per_sec"]) == (2.0, 10.0)


def test_torch_s_profiler_leaves_a_trace_of_a_rank(policy: Path, tmp_path: Path) -> None:
    module = RaggedGRPO(CausalLM(str(policy)), reward=length, group_size=2, max_response_length=3)
    trainer = Trainer(str(tmp_path), max_steps=5, profiler="pytorch", accelerator="cpu")
    trainer.fit(module, sums(8, 2))
    events = json.loads((tmp_path / "profiler/rank0.json").read_text())["traceEvents"]
    assert any(event["name"] == "aten::mm" for event in events)
    assert {event["name"] for event in events if "ProfilerStep" in event["name"]} == {
        f"ProfilerStep#{n}" for n in (2, 3, 4)
    }


def test_torch_s_profiler_says_that_a_run_was_too_short(
    policy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = RaggedGRPO(CausalLM(str(policy)), reward=length, group_size=2, max_response_length=3)
    Trainer(str(tmp_path), max_steps=1, profiler="pytorch", accelerator="cpu").fit(module, sums(8, 2))
    assert (
        "`trainer.profiler` is pytorch, which records from step 3 on, and nothing is recorded" in capfd.readouterr().out
    )


CONFIG = """
module: {class_path: GRPO, init_args: {actor: tiny, group_size: 2, reward: exact_match}}
data: {train: rows.jsonl}
trainer: {devices: auto, accelerator: cpu, precision: bf16-true, profiler: simple, fast_dev_run: 3}
callbacks:
- {class_path: timer, init_args: {duration: "00:12:00:00"}}
- {class_path: ModelCheckpoint, init_args: {every_n_train_steps: 5, train_time_interval: {minutes: 30}}}
- {class_path: sample_table, init_args: {every_n_steps: 10, n: 8}}
- learning_rate_monitor
- throughput_monitor
"""


def test_a_config_takes_lightning_s_names_and_runs_again_as_it_was_resolved(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    (tmp_path / "my.yaml").write_text(CONFIG.replace("rows.jsonl", str(tmp_path / "rows.jsonl")))
    first = read_fit(["--config", str(tmp_path / "my.yaml")])
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(first.config))
    for found in (first, read_fit(["--config", str(tmp_path / "again.yaml")])):
        trainer = found.trainer
        assert (trainer.devices, trainer.max_steps, trainer.strategy.dtype) == (1, 3, torch.bfloat16)
        assert (trainer.save_every_n_steps, trainer.save_every_seconds) == (5, 1800.0)
        assert (trainer.log_samples, trainer.log_samples_every_n_steps) == (8, 10)
        timer, *_ = trainer.callbacks
        assert timer.time_remaining() == 12 * 3600
        assert type(trainer.callbacks[-1]).__name__ == "SimpleProfiler"


class Forgotten(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class SetUp(Callback):
    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        pass


class Stepping(RaggedGRPO):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        pass


class Preparing(RaggedGRPO):
    def prepare_data(self) -> None:
        pass


class Starting(RaggedGRPO):
    def on_train_start(self) -> None:
        pass


def fitted(kind: type[RaggedGRPO]) -> Callable[[], Any]:
    return lambda: Trainer("unused").fit(kind("tiny", reward=length, group_size=2), [{"prompt": "1"}])


def test_every_argument_of_lightning_s_trainer_is_taken_or_answered() -> None:
    from lightning.pytorch import Trainer as LightningTrainer

    theirs, ours = (set(inspect.signature(each).parameters) for each in (LightningTrainer, Trainer))
    assert set(TRAINER_ARGUMENTS) == theirs - ours
    for name in theirs - ours:
        with pytest.raises(UserError, match=rf"^Trainer has no argument `{name}`\. .{{12}}"):
            Trainer(**{name: 1})  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=r"`trainer.gradient_clip_val` \(1\) is not a known key\. Give `gradient_clipping"
    ):
        read_fit(["--module", "SFT", "--module.actor", "tiny", "--trainer.gradient_clip_val", "1"])


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--ckpt_path", "Give `trainer.ckpt_path` to resume"),
        ("--seed_everything", "Give `seed`"),
        ("--model.lr", "The algorithm is `module`, and its models are arguments of it, such as `module.actor`"),
        ("--optimizer.lr", "Give `optimizer` of a model, such as `module.actor.optimizer`"),
        ("--lr_scheduler", "Give `schedule` of a model's optimizer, such as `module.actor.optimizer.schedule`"),
        ("--trainer.logger", "It is a key of its own: `logger`, not `trainer.logger`"),
        ("--trainer.max_time", "Give `max_seconds`, or the callback Timer, which counts resumed runs too"),
        ("--trainer.limit_train_batches", "Give `max_steps`, or fewer rows"),
    ],
)
def test_an_option_of_lightning_s_command_line_is_answered(option: str, answer: str) -> None:
    with pytest.raises(UserError, match=rf"is not a known key\. {re.escape(answer)}") as error:
        read_fit(["--module", "SFT", "--module.actor", "tiny", option, "1"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("method", "argument", "answer"),
    [
        ("fit", "datamodule", "Rows or a LightningDataModule are the second argument, `train`"),
        ("fit", "val_dataloaders", "Rows to validate on are the third argument, `validation`"),
        ("fit", "ckpt_path", "It is an argument of `Trainer`"),
        ("fit", "vaildation", 'Did you mean "validation"?'),
        ("validate", "dataloaders", "Rows or a LightningDataModule are the second argument, `validation`"),
        ("test", "ckpt_path", "Set the module's `model` to the folder of the run"),
        ("predict", "datamodule", "Rows or a LightningDataModule are the second argument, `prompts`"),
    ],
)
def test_an_argument_of_lightning_s_fit_and_others_is_answered(method: str, argument: str, answer: str) -> None:
    with pytest.raises(UserError) as error:
        getattr(Trainer(), method)(RLModule(), **{argument: None})
    assert str(error.value) == f"Trainer.{method} has no argument `{argument}`. {answer}"


@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
def test_every_argument_of_lightning_s_methods_has_an_answer_that_names_ours(method: str) -> None:
    from lightning.pytorch import Trainer as LightningTrainer

    theirs, ours = (list(inspect.signature(getattr(each, method)).parameters) for each in (LightningTrainer, Trainer))
    assert set(METHOD_ARGUMENTS[method]) == set(theirs) - set(ours)
    rows = {"fit": "train", "predict": "prompts"}.get(method, "validation")
    assert ours[:3] == ["self", "module", rows]
    assert f"`{rows}`" in METHOD_ARGUMENTS[method]["model"]
    assert f"`{rows}`" in METHOD_ARGUMENTS[method]["datamodule"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (lambda: Trainer(precision="bf16-mixed", strategy=FSDPStrategy("bf16")), "the strategy has a precision too"),
        (lambda: Trainer(precision="bf16-true", strategy="fsdp"), "keeps weights in float32; give bf16-mixed"),
        (lambda: Trainer(precision="bf16-mixed", strategy="single"), "give bf16-true, or `strategy: fsdp`"),
        (lambda: Trainer(precision="16-true", strategy="single"), "SingleProcess trains in fp32, bf16, fp64"),
        (lambda: Trainer(precision=16, strategy=DeepSpeedStrategy(0)), "and `stage` is 0, at which DeepSpeed"),
        (lambda: Trainer(precision="8"), "is '8'; give one of 32-true, bf16-mixed"),
        (lambda: Trainer(devices=[0, 1]), r"`trainer.devices` is \[0, 1\]; give a whole number"),
        (lambda: Trainer(logger="mlflow"), "`logger` names MLFlowLogger, whose library is missing"),
        (lambda: Trainer(max_step=3), 'Trainer has no argument `max_step`. Did you mean "max_steps"'),  # type: ignore[call-arg]
        (lambda: Trainer(profiler="advanced"), "`trainer.profiler` is 'advanced'; give simple or pytorch"),
        (lambda: Trainer(ckpt_path="best"), "is 'best' and `trainer.monitor` is not set"),
        (
            lambda: Trainer(save_top_k=2, monitor="a", callbacks=ModelCheckpoint(monitor="b", every_n_train_steps=1)),
            "`trainer.monitor` is 'a', and the callback ModelCheckpoint sets it to 'b'",
        ),
        (lambda: Trainer(callbacks=ModelCheckpoint()), "does not say when to save"),
        (lambda: ModelCheckpoint(save_top_k=3), "`save_top_k` of ModelCheckpoint is 3 and `monitor` is not set"),
        (lambda: ModelCheckpoint(dirpath="x"), "`dirpath` of ModelCheckpoint is 'x', and checkpoints are in `checkp"),
        (lambda: ModelCheckpoint(every_n_epochs=1), "give `every_n_train_steps`"),
        (lambda: ModelCheckpoint(None, None, "x", True), "`verbose` of ModelCheckpoint is True, and `checkpo"),
        (lambda: ModelCheckpoint(enable_version_counter=False), "is False, and a checkpoint is named after its step"),
        (lambda: ModelCheckpoint(save_top_k=0), "`save_top_k` of ModelCheckpoint is 0, so it saves nothing"),
        (lambda: Timer("12:00:00"), "`duration` of Timer is '12:00:00'; give DD:HH:MM:SS"),
        (lambda: Timer(interval="epoch"), "`interval` of Timer is 'epoch'"),
        (lambda: LearningRateMonitor("epoch"), "`logging_interval` of LearningRateMonitor is 'epoch'"),
        (lambda: ThroughputMonitor(batch_size_fn=len), "`batch_size_fn` of ThroughputMonitor is given"),
        (lambda: Trainer(callbacks=object()), "`callbacks` is <object object at .*; give a Callback, or the name"),  # type: ignore[arg-type]
        (lambda: Trainer(callbacks=Forgotten()), "`on_train_batch_end` of .* is never called; write `on_step_end`"),
        (fitted(Stepping), "`training_step` of Stepping is never called; write a node"),
        (fitted(Preparing), "`prepare_data` of Preparing is never called; prepare the rows before the run"),
        (fitted(Starting), "`on_train_start` of Starting is never called; write it in a `Callback`"),
        (lambda: Trainer(callbacks=SetUp()), "`setup` of the callback SetUp is never called; write `on_fit_start`"),
        (lambda: EarlyStopping("x", patience=None), "would never stop; set one of them"),
        (lambda: EarlyStopping("x", mode="maximum"), "`mode` of EarlyStopping is 'maximum'; give min or max"),  # type: ignore[arg-type]
        (lambda: Trainer(mode="maximum"), "`trainer.mode` is 'maximum'; give min or max"),  # type: ignore[arg-type]
        (lambda: Trainer(save_last="link"), "`trainer.save_last` is 'link'; give 2 or more"),  # type: ignore[arg-type]
        (lambda: Timer({"hour": 3}), "is {'hour': 3}; give arguments of a timedelta"),
        (lambda: Timer(3600), "`duration` of Timer is 3600; give DD:HH:MM:SS"),  # type: ignore[arg-type]
        (lambda: Timer().time_elapsed("validate"), "the stage 'validate', and it measures training"),  # type: ignore[arg-type]
        (
            lambda: Keeps(0.1, "lrs"),
            "`save_hyperparameters` was given 'lrs', .* not an argument of Keeps; .* Did you mean",
        ),
        (lambda: Keeps(0.1, 7), "`save_hyperparameters` was given 7, .* give names of arguments, or a dict of values"),
        (lambda: Mine.load_from_checkpoint("nowhere"), "'nowhere' is neither a folder of a run with a model of Mine"),
    ],
)
def test_what_does_not_map_is_refused_in_one_line(typed: Callable[[], Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        typed()
    assert "\n" not in str(error.value)
