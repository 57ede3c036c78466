"""Trainer: the settings and methods of a run."""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, get_args

from rlflow.callbacks.callback import Callback, RunningTrainer
from rlflow.callbacks.hooks import Callbacks, check_callbacks
from rlflow.callbacks.presets import ModelCheckpoint, Preset
from rlflow.callbacks.profilers import profiler_named
from rlflow.controller.run import Run
from rlflow.data.loader import scan_together
from rlflow.data.prompts import PromptData
from rlflow.data.sources import DataLike, as_source, is_data_module
from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError, about
from rlflow.lightning_names import with_known_arguments
from rlflow.loggers.lightning import LoggerLike
from rlflow.module import RLModule, handles
from rlflow.process import startup, status
from rlflow.process.devices import require_accelerator, require_known_gpu
from rlflow.process.environment_variables import require_no_rank, require_started
from rlflow.process.scratch import scratch_folder
from rlflow.process.status import refusing_exits
from rlflow.rollout.assignment import EngineSettings, Share
from rlflow.rollout.engine import RolloutEngine
from rlflow.run.fit import fit
from rlflow.run.folder import require_folder, require_own
from rlflow.run.prediction import predict
from rlflow.run.preflight import check_apart, check_monitors, check_rows
from rlflow.run.prepare import prepare
from rlflow.run.replay import Replayed, replay
from rlflow.run.validation import test, validate
from rlflow.settings import Settings
from rlflow.short_names import made
from rlflow.strategies.precision import keeps_float32, use_precision
from rlflow.strategies.single import SingleProcess
from rlflow.strategies.strategy import TrainingStrategy

Result = TypeVar("Result")


@with_known_arguments
@dataclass(eq=False)
class Trainer(RunningTrainer):
    """Runs an algorithm: starts processes, loads models, runs steps and validations, and writes the results.

    A strategy, an engine, a logger or a callback may be given by its short name (`rlflow.short_names`) or by the dotted
    path of its class. It is then constructed with the defaults of its class.

    Example:
        ```python
        trainer = Trainer("runs/first", max_steps=20, devices=2, strategy="fsdp", rollout="vllm", logger="wandb")
        summary = trainer.fit(GRPO("Qwen/Qwen2.5-0.5B", reward=exact, group_size=8), "problems.jsonl")
        ```

    Args:
        strategy: Strategy that distributes training over ranks. None for ZeRO-2 on several ranks, and for
            `SingleProcess` on one rank (for FSDP if `precision` is mixed).
        rollout: The engine that generates; None for `TransformersEngine`.
        engines: For policies that do not use `rollout`: by policy, another engine, or a `Share` of another policy's.
        logger: One or several loggers, of rlflow or Lightning, in addition to the run's own files. As in Lightning,
            True is TensorBoard if it is installed, and CSV if not. A run writes CSV in any case.
        callbacks: Callbacks for steps, nodes and validations.
    """

    strategy: TrainingStrategy | str | None = None
    rollout: RolloutEngine | str | None = None
    engines: Mapping[str, Share | RolloutEngine | str] | None = None
    logger: LoggerLike | str | bool | Sequence[LoggerLike | str] | None = None  # type: ignore[assignment]  # afterwards the first
    callbacks: Callback | str | Sequence[Callback | str] = ()

    def __post_init__(self) -> None:
        if self.fast_dev_run:
            self.max_steps = 2 if self.fast_dev_run is True else self.fast_dev_run
        several = isinstance(self.callbacks, Sequence) and not isinstance(self.callbacks, str)
        given: Sequence[Any] = self.callbacks if several else [self.callbacks]  # type: ignore[assignment]
        self.callbacks = self._callbacks = [made(each, "callbacks", Callback) for each in given]
        for each in self._callbacks:
            if isinstance(each, Preset):
                each.set_in(self)
        super().__post_init__()
        if self.profiler is not None:
            self._callbacks.append(profiler_named(self.profiler))
        self.strategy = made(self.strategy, "strategy", TrainingStrategy)
        if isinstance(self.strategy, TrainingStrategy):
            self.strategy = self.strategy.as_given()
        if self.precision is not None:
            strategy = self._strategy()
            use_precision(strategy, self.precision)
            self.strategy = strategy
        engine: RolloutEngine = made(self.rollout or "transformers", "rollout", RolloutEngine)
        engines = (self.engines or {}).items()
        others = {name: made(each, f"engines.{name}", RolloutEngine, Share) for name, each in engines}
        self.rollout, self.engines, self.engine_settings = engine, others, EngineSettings(engine, others)
        if self.logger is True:
            self.logger = "tensorboard" if find_spec("tensorboard") else None
        given = [self.logger] if isinstance(self.logger, str | LoggerLike) else self.logger or ()
        self.loggers = [made(each, "logger", *get_args(LoggerLike)) for each in given]
        self.logger = self.loggers[0] if self.loggers else None
        check_callbacks(self._callbacks)
        self.resolved_config: str | None = None

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first `ModelCheckpoint` of the trainer; its `best_model_path` is set at the end of `fit`."""
        return next((each for each in self._callbacks if isinstance(each, ModelCheckpoint)), None)

    def fit(self, module: RLModule, train: DataLike | PromptData, validation: DataLike | None = None) -> dict[str, Any]:
        """Train, and return the run's summary: validation before and after training, steps, seconds.

        With more than one device, the first process starts the others by running its own command line again.

        Args:
            module: The algorithm.
            train: Rows to train on, in any form that `PromptData` takes: a `datasets.Dataset`, a list of dicts, the
                path of a file, and others; or a `PromptData`, which has all settings of how rows are read.
            validation: Rows to validate on, in the same forms; None for no validation, or if `train` is a `PromptData`.

        Raises:
            UserError: The user can correct something. It is raised before processes start if it can be known by then.
        """
        data = _data(train, validation)
        check_monitors(self.settings, self._callbacks, data)
        run = partial(fit, loggers=self.loggers, state=self, resolved_config=self.resolved_config)
        return self._launch(module, data, self.settings, run)

    def validate(self, module: RLModule, validation: DataLike | PromptData) -> dict[str, Any]:
        """Validate the module's model, and return the metrics and the number of problems.

        The metrics are those of `fit` before its first step, and are in `<run_dir>-validate/validation.json`. No
        optimizer is built. Only the model that generates is loaded; if the module scores rows, all models are loaded.

        Args:
            module: The algorithm.
            validation: Rows to validate on, in any form that `PromptData` takes; or a `PromptData` that has some.

        Raises:
            UserError: For the reasons of `fit`, or because there is nothing to validate on.
        """
        data = validation if isinstance(validation, PromptData) else _validated(validation)
        return self._measure(validate, module, data)

    def test(self, module: RLModule, validation: DataLike | PromptData) -> dict[str, Any]:
        """Score responses to every held-out prompt, with intervals over prompts: avg@k, pass@k, and greedy accuracy.

        For each prompt, `val_samples` responses are sampled by `val_sampling`, and one at temperature 0. The results
        (see `rlflow.run.validation.test`) are in `<run_dir>-test/test.json`, and the responses in `responses.jsonl`
        of the same folder.

        Args:
            module: The algorithm: a model and a reward. If the model is a run's folder, the run's model is loaded.
            validation: As for `validate`; rows to train on are not read. A `LightningDataModule` needs a
                `test_dataloader`.

        Raises:
            UserError: For the reasons of `validate`, or because the module has an environment, or no reward.
        """
        data = validation
        if isinstance(data, PromptData) and data.validation is not None:
            held_out, data = data.validation, copy.copy(data)
            data.train = held_out
            data.prompts_per_step = max(1, min(data.prompts_per_step, len(held_out)))
        return self._measure(test, module, data if isinstance(data, PromptData) else _validated(data, "test"))

    def predict(self, module: RLModule, prompts: DataLike | PromptData) -> dict[str, Any]:
        """Write `val_samples` responses to each prompt, as JSON Lines, to `<run_dir>-predict/responses.jsonl`.

        If it is started again with the same model, prompts and settings, it continues with the prompts that have no
        responses yet.

        Args:
            module: An algorithm that generates, such as GRPO. No reward is called.
            prompts: The prompts, in any form that `PromptData` takes; or a `PromptData`, whose `train` is read. A
                `LightningDataModule` needs a `predict_dataloader`.

        Raises:
            UserError: For the reasons of `fit`, or because the module has an environment, or generates nothing.
        """
        self._require_no_checkpoint("`rlflow predict`")
        data = copy.copy(prompts) if isinstance(prompts, PromptData) else _validated(prompts, "predict")
        data.validation = data.curriculum = None
        data.prompts_per_step = max(1, min(data.prompts_per_step, len(data.train)))
        reward, module.reward = module.reward, None  # rows need not have what it reads
        try:
            run = partial(predict, state=self, resolved_config=self.resolved_config)
            return self._launch(module, data, self.settings.for_command("predict"), run, trains=False)
        finally:
            module.reward = reward

    def _measure(self, command: Callable[..., dict[str, Any]], module: RLModule, data: PromptData) -> dict[str, Any]:
        """Run `validate` or `test` in the folder of its name."""
        if data.validation is None:
            raise UserError("`data.validation` is not set, so there is nothing to validate on; name a dataset")
        self._require_no_checkpoint("validation")
        run = partial(command, state=self, resolved_config=self.resolved_config)
        return self._launch(module, data, self.settings.for_command(command.__name__), run, trains=False)

    def _require_no_checkpoint(self, reader: str) -> None:
        if self.ckpt_path is not None:
            raise UserError(
                f"`trainer.ckpt_path` is {self.ckpt_path!r}, and {reader} reads a model; leave it out, and"
                " set the module's `model` to the folder of the run"
            )

    def replay(
        self,
        module: RLModule,
        data: DataLike | PromptData,
        run_dir: str | Path,
        step: int,
        node: str | None = None,
        debug: bool = False,
    ) -> list[Replayed]:
        """Run nodes of a step of an earlier run again, in this process, on the inputs that the earlier run stored.

        Args:
            module: Module of that run.
            data: Data of that run.
            run_dir: Folder of that run.
            step: Step of that run, from 1.
            node: Name of the node; None for all nodes with stored inputs.
            debug: Whether the debugger stops at the beginning of each node.

        Raises:
            UserError: Nothing was stored of the step, or `devices` is not 1.
        """
        if (ranks := self.world_size) != 1:
            raise UserError(f"`trainer.devices` gives {ranks} ranks, and a step is replayed in one process; set 1")
        again = partial(replay, run_dir=Path(run_dir), step=step, node_id=node, debug=debug)
        return self._launch(module, _data(data), self.settings, again)

    def _strategy(self) -> TrainingStrategy:
        """The strategy that was given, or the one by default."""
        by_default = "single" if self.world_size == 1 else "deepspeed"
        if self.world_size == 1 and keeps_float32(self.precision):
            by_default = "fsdp"
        strategy: TrainingStrategy = made(self.strategy or by_default, "strategy", TrainingStrategy)
        return strategy

    def _launch(
        self,
        module: RLModule,
        data: PromptData,
        settings: Settings,
        start: Callable[[Run, Callbacks], Result],
        trains: bool = True,
    ) -> Result:
        """Prepare a run, bring up its ranks, and `start` it on each."""
        from lightning.fabric import Fabric
        from torch.distributed import is_initialized

        startup.begin()
        self.should_stop, self.global_step, self.current_epoch, self.callback_metrics = False, 0, 0, {}
        self.checkpoints = {}
        require_accelerator(settings.accelerator)
        require_folder(settings.folder)
        if isinstance(self.strategy, TrainingStrategy):
            self.strategy = self.strategy.as_given()
            self.strategy.note_as_given()
        strategy = self._strategy()
        status.mine().limit_s = 0.0 if strategy.timeout is None else strategy.timeout.total_seconds()
        self.engine_settings.check_installed()

        def run(_: Fabric) -> Result:
            self.global_rank = strategy.global_rank
            with refusing_exits():
                transport = Transport(strategy.root_device, strategy.timeout)
                scan_together(prepared.loaders, transport, keeps=strategy.local_rank == 0)
                if not was_scanned:
                    check_rows(prepared)
                startup.passed("ranks")
                return start(prepared, Callbacks(self._callbacks, self, module))

        with tempfile.TemporaryDirectory(dir=scratch_folder()) as scratch:
            prepared = prepare(module, data, settings, strategy, self.engine_settings, Path(scratch), trains)
            check_apart(prepared.policies | prepared.paths, settings.folder)
            require_own(settings.folder)
            with about(strategy):
                strategy.check_roles(handles(module), prepared.layouts)
            if isinstance(strategy, SingleProcess) and settings.num_nodes > 1:
                raise UserError(
                    f"`trainer.num_nodes` is {settings.num_nodes}; SingleProcess runs on 1. For more use"
                    " `strategy: deepspeed` or `strategy: fsdp`."
                )
            require_started(settings.world_size, settings.num_nodes)
            require_no_rank(settings.world_size)
            if is_initialized() and (ranks := Transport().world_size) != settings.world_size:
                raise UserError(
                    f"`trainer.devices` gives {settings.world_size} rank{'s' * (settings.world_size > 1)}, and an"
                    f" earlier run in this process had {ranks}; all runs of a script have the same ranks. Give the same"
                    " number and call it on all ranks, or put it into another script"
                )
            with warnings.catch_warnings():
                if "SLURM_JOB_ID" not in os.environ:  # in a job the hint is right
                    warnings.filterwarnings("ignore", "The `srun` command is available")
                fabric = Fabric(
                    accelerator=settings.accelerator,
                    devices=settings.ranks_here,
                    num_nodes=settings.num_nodes,
                    strategy=strategy.processes,
                )
            require_known_gpu(strategy.root_device, strategy.dtype)
            for policy, engine in prepared.engines.own.items() if prepared.generates else ():
                with about(engine):
                    if strategy.float32_head:
                        engine.use_float32_head()
                    engine.check_model(prepared.configs[policy])
                    users = prepared.engines.users(policy)
                    if any("experts" in handles(module)[user].model_inputs for user in users):
                        engine.return_experts()
                    if most := max(prepared.support_bounds.get(user, 0) for user in users):
                        engine.return_support(most)
                    engine.check_device(strategy.root_device)
            was_scanned = prepared.is_scanned
            if was_scanned:
                check_rows(prepared)
            startup.passed("data")
            results: Result = fabric.launch(run)
        return results


def _data(train: DataLike | PromptData, validation: DataLike | None = None) -> PromptData:
    """The datasets of `fit`."""
    if not isinstance(train, PromptData):
        return PromptData(train, validation)
    if validation is not None:
        raise UserError("`validation` is given together with a PromptData, which has its own; set it there")
    return train


def _validated(validation: DataLike, stage: str = "validation") -> PromptData:
    """Rows to validate on, without rows to train on; a data module gives those of the loader of `stage`."""
    rows = as_source(validation, "data.validation", stage if is_data_module(validation) else "validation")
    return PromptData(rows, rows, prompts_per_step=max(1, min(32, len(rows))))
