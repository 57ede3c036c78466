"""Trainer: what a user configures of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from rlflow.callbacks.callback import Callback
from rlflow.callbacks.hooks import Callbacks, check_callbacks
from rlflow.data.loader import scan_together
from rlflow.data.prompts import PromptData
from rlflow.databuffer.balance import Balance
from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError, about
from rlflow.module import RLModule, handles
from rlflow.process import startup, status
from rlflow.process.devices import require_accelerator, require_known_gpu
from rlflow.process.scratch import scratch_folder
from rlflow.process.status import refusing_exits
from rlflow.rollout.assignment import EngineSettings, Share
from rlflow.rollout.engine import RolloutEngine
from rlflow.rollout.transformers import TransformersEngine
from rlflow.run.checks import check_apart, check_monitors, check_rows
from rlflow.run.fit import fit
from rlflow.run.folder import require_folder
from rlflow.run.folder_lock import require_own
from rlflow.run.prepare import prepare
from rlflow.run.prepared_run import Prepared
from rlflow.run.recording import LoggerLike
from rlflow.run.replay import Replay, Replayed, replay
from rlflow.run.validation import validate
from rlflow.run_state import RunState
from rlflow.settings import Placed, Settings
from rlflow.strategies.deepspeed import DeepSpeedStrategy
from rlflow.strategies.single import SingleProcess
from rlflow.strategies.strategy import TrainingStrategy

Result = TypeVar("Result")


class Trainer:
    """Runs an algorithm: processes, models, steps, validation, and what is left behind.

    Args:
        run_dir: Folder of the results; what lay there before is kept under another name.
        max_steps: Steps at most; a step is one batch of prompts through the whole graph.
        max_epochs: Passes over the training rows at most.
        max_seconds: Stop after the step in which the run has lasted so long.
        devices: Processes of this machine, one for each accelerator.
        num_nodes: Machines.
        accelerator: `cpu`, `cuda`, or what is there.
        val_check_interval: Steps between validations; one comes before the first step and one after the last.
        limit_val_batches: Batches of `data.prompts_per_step` held-out prompts that are validated on at most.
        val_samples: Responses to each held-out prompt at the policy's temperature; with 2 or more, pass@k is logged.
        log_every_n_steps: Steps between those whose metrics and samples are recorded; validations always are.
        save_every_n_steps: Steps between checkpoints, with one at the end and the model beside them; None for just the
            model at the end.
        save_every_seconds: Seconds after which the next step is followed by a checkpoint; may be given beside steps.
        save_last: The last so many checkpoints stay, 2 at least: if one is damaged, there is another. True for 2.
        save_top_k: And so many of the best by `monitor`, which may be among the last; -1 for all.
        monitor: The metric that `save_top_k` goes by, as it was when the checkpoint was written.
        mode: Whether a smaller (`min`) or a larger (`max`) value of `monitor` is better.
        async_save: Write checkpoints and models beside the steps: a step waits only until its rank's part of
            the state is copied to the CPU's memory.
        ckpt_path: Continue from a checkpoint, to the bit: `last` of `run_dir`, or a checkpoint's folder; `auto` for the
            last if there is one, and else a new run.
        grace_s: Seconds from a signal that ends `rlflow fit` (SIGTERM, SIGHUP, SIGUSR1, Ctrl-C) to its end, in which
            the step is left or finished, and saved; a second signal ends it at once.
        keep_inputs: Steps in which what nodes read and make is kept for `rlflow replay`; of a node that raises always.
        keep_inputs_of: The nodes that `keep_inputs` is of; empty for all.
        balance: `auto` moves rows between ranks to even out tokens where it pays, `off` leaves them; or the constants
            by which that is decided.
        logprob_gap_limit: Largest mean difference of rollout and training logprobs; None for 1e-3 (0.05 in bf16, 0.01
            in fp16), and for two limits more that follow from the run itself, see `sync/logprob_gap_uncertain`.
        skip_spikes: Skip an update whose gradient's norm is more than so many times the median of the role's last 32
            above 0; None for none. One that is infinite or NaN is always skipped, by all ranks.
        max_skipped: So many updates of a role that are skipped in a row end the run.
        sync_bucket_bytes: Weights gathered at once on their way into the rollout engine.
        fast_dev_run: Run two steps of every part, with validation, and leave nothing behind but logs and traces, in
            `<run_dir>-dev`.
        placement: By role, `actor.rollout` for the engines of `actor` and `rollout` for those of all other policies:
            the ranks or machines it lives on; all where it is not named.
        max_staleness: Steps that generation runs ahead of training, with weights so many steps old; needs ranks of its
            own for `rollout`.
        partial_rollout: Tokens by which a response grows at most with one draw of prompts, of a conversation the
            policy's; longer ones are cut off, and go on with the weights of the next. None for whole responses.
        strategy: How training is spread over ranks; None for one process without DeepSpeed, else ZeRO-2.
        rollout: The engine that generates; None for transformers' own.
        engines: By policy, an engine other than `rollout`, or a `Share` of another policy's.
        logger: Where metrics go beside the run's own files; one or several of ours or of Lightning's.
        callbacks: Told of steps, nodes and validations.
        seed: Of everything random.
    """

    def __init__(
        self,
        run_dir: str = "runs/default",
        max_steps: int | None = None,
        max_epochs: int | None = None,
        max_seconds: float | None = None,
        devices: int = 1,
        num_nodes: int = 1,
        accelerator: Literal["auto", "cpu", "cuda"] = "auto",
        val_check_interval: int | None = None,
        limit_val_batches: int | None = None,
        val_samples: int = 1,
        log_every_n_steps: int = 1,
        save_every_n_steps: int | None = None,
        save_every_seconds: float | None = None,
        save_last: int | bool = 2,
        save_top_k: int = 0,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        async_save: bool = False,
        ckpt_path: str | None = None,
        grace_s: float = 30.0,
        keep_inputs: Sequence[int] = (),
        keep_inputs_of: Sequence[str] = (),
        balance: Literal["auto", "off"] | Balance = "auto",
        logprob_gap_limit: float | None = None,
        skip_spikes: float | None = None,
        max_skipped: int = 3,
        sync_bucket_bytes: int = 256 * 2**20,
        fast_dev_run: bool = False,
        placement: dict[str, Placed] | None = None,
        max_staleness: int = 0,
        partial_rollout: int | None = None,
        strategy: TrainingStrategy | None = None,
        rollout: RolloutEngine | None = None,
        engines: dict[str, RolloutEngine | Share] | None = None,
        logger: LoggerLike | Sequence[LoggerLike] = (),
        callbacks: Sequence[Callback] = (),
        seed: int = 0,
    ) -> None:
        if not Path(run_dir.strip()).name.strip(".") or not run_dir.isprintable():
            raise UserError(f"`trainer.run_dir` is {run_dir!r}; name a folder, such as runs/mine")
        self.settings = Settings(
            run_dir=Path(run_dir).with_name(f"{Path(run_dir).name}-dev") if fast_dev_run else Path(run_dir),
            max_steps=2 if fast_dev_run else max_steps,
            max_epochs=max_epochs,
            max_seconds=max_seconds,
            devices=devices,
            num_nodes=num_nodes,
            accelerator=accelerator,
            val_check_interval=val_check_interval,
            limit_val_batches=limit_val_batches,
            val_samples=val_samples,
            log_every_n_steps=log_every_n_steps,
            save_every_n_steps=save_every_n_steps,
            save_every_seconds=save_every_seconds,
            save_last=2 if save_last is True else int(save_last),
            save_top_k=save_top_k,
            monitor=monitor,
            mode=mode,
            async_save=async_save,
            ckpt_path=ckpt_path,
            grace_s=grace_s,
            keep_inputs=tuple(keep_inputs),
            keep_inputs_of=tuple(keep_inputs_of),
            balance=Balance(balance) if isinstance(balance, str) else balance,
            logprob_gap_limit=logprob_gap_limit,
            skip_spikes=skip_spikes,
            max_skipped=max_skipped,
            sync_bucket_bytes=sync_bucket_bytes,
            fast_dev_run=fast_dev_run,
            placement=placement,
            max_staleness=max_staleness,
            partial_rollout=partial_rollout,
            seed=seed,
        )
        check_callbacks(callbacks)
        self.strategy = strategy
        self.rollout = rollout
        self.engines = engines or {}
        self.callbacks = list(callbacks)
        self.loggers = [logger] if isinstance(logger, LoggerLike) else list(logger)
        self.resolved_config: str | None = None
        self._state = RunState(world_size=self.settings.machines.world_size)

    def fit(self, module: RLModule, data: PromptData) -> dict[str, Any]:
        """Train, and return the run's summary: validation before and after, steps, seconds.

        With more than one device, the first process starts the others by running its own command line again.

        Raises:
            UserError: Something that the user can mend; before processes start where it can be known then.
        """

        def run(prepared: Prepared, callbacks: Callbacks) -> dict[str, Any]:
            return fit(prepared, callbacks, self.loggers, self._state, self.resolved_config)

        return self._launch(module, data, self.settings, run)

    def validate(self, module: RLModule, data: PromptData) -> dict[str, Any]:
        """Validate the module's model on `data.validation`; the metrics, and the number of problems.

        They are those of `fit` before its first step, and lie in `<run_dir>-validate/validation.json`. No optimizer is
        built, and no model is loaded but the one that generates; all are for a module with a `validation_step`.

        Raises:
            UserError: As `fit`; and if there is nothing to validate on.
        """
        if data.validation is None:
            raise UserError("`data.validation` is not set, so there is nothing to validate on; name a dataset")
        if self.settings.ckpt_path is not None:
            raise UserError(
                f"`trainer.ckpt_path` is {self.settings.ckpt_path!r}, and validation reads a model; leave it out, and"
                " set the module's `model` to the `model` folder of the run"
            )

        def run(prepared: Prepared, callbacks: Callbacks) -> dict[str, Any]:
            return validate(prepared, callbacks, self._state, self.resolved_config)

        return self._launch(module, data, self.settings.for_validation(), run)

    def replay(self, module: RLModule, data: PromptData, asked: Replay) -> list[Replayed]:
        """Run nodes of a step of an earlier run once more, in this process, on what that run kept of them.

        Args:
            module: That run's.
            data: That run's.
            asked: Which run, step and node.

        Raises:
            UserError: Nothing was kept of it, or `devices` is not 1.
        """
        if (ranks := self.settings.machines.world_size) != 1:
            raise UserError(f"`trainer.devices` gives {ranks} ranks, and a step is replayed in one process; set 1")
        return self._launch(module, data, self.settings, partial(replay, asked))

    @property
    def engine_settings(self) -> EngineSettings:
        """What generates, as configured."""
        return EngineSettings(self.rollout or TransformersEngine(), self.engines)

    @property
    def should_stop(self) -> bool:
        """Whether the run ends after the step that it is at; a callback may set it, on all ranks alike."""
        return self._state.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._state.should_stop = value

    @property
    def global_step(self) -> int:
        """Steps of the run that are done, those before it was resumed included. A step may be several updates."""
        return self._state.step

    @property
    def current_epoch(self) -> int:
        """The pass over the training rows that the last step drew from, from 0.

        Where a module's `choose_prompts` chooses, counted as if it chose all of them.
        """
        return self._state.epoch

    @property
    def callback_metrics(self) -> Mapping[str, float]:
        """The metrics of the last step and of the last validation, the same on every rank."""
        return self._state.metrics

    @property
    def global_rank(self) -> int:
        """This process among all of the run, from 0; 0 before the run's processes have started."""
        return self._state.rank

    @property
    def world_size(self) -> int:
        """Processes of the run: `devices` times `num_nodes`."""
        return self._state.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0, which writes what the run leaves behind."""
        return self._state.rank == 0

    @property
    def logger(self) -> LoggerLike | None:
        """The first of `loggers`; None without."""
        return self.loggers[0] if self.loggers else None

    def _launch(
        self,
        module: RLModule,
        data: PromptData,
        settings: Settings,
        start: Callable[[Prepared, Callbacks], Result],
    ) -> Result:
        """Prepare a run, bring up its ranks, and `start` it on each."""
        from lightning.fabric import Fabric

        startup.begin()
        machines = settings.machines
        self._state = RunState(world_size=machines.world_size)
        require_accelerator(settings.accelerator)
        check_monitors(settings, self.callbacks, data)
        require_folder(settings.run_dir)
        strategy = self.strategy or (SingleProcess() if machines.world_size == 1 else DeepSpeedStrategy())
        status.limit(0.0 if strategy.timeout is None else strategy.timeout.total_seconds())
        self.engine_settings.check_installed()

        def run(_: Fabric) -> Result:
            self._state.rank = strategy.global_rank
            with refusing_exits():
                transport = Transport(strategy.root_device, strategy.timeout)
                scan_together(prepared.loaders, transport, keeps=strategy.local_rank == 0)
                if not was_scanned:
                    check_rows(prepared)
                startup.passed("ranks")
                return start(prepared, Callbacks(self.callbacks, self, module))

        with tempfile.TemporaryDirectory(dir=scratch_folder()) as scratch:
            prepared = prepare(module, data, settings, strategy, self.engine_settings, Path(scratch))
            check_apart(prepared.policies | prepared.paths, settings.run_dir)
            require_own(settings.run_dir)
            with about(strategy):
                strategy.check_roles(handles(module), prepared.layouts)
            if isinstance(strategy, SingleProcess) and settings.num_nodes > 1:
                raise UserError(
                    f"`trainer.num_nodes` is {settings.num_nodes}; SingleProcess runs on 1. For more use"
                    " `strategy: deepspeed` or `strategy: fsdp`."
                )
            fabric = Fabric(
                accelerator=settings.accelerator,
                devices=settings.devices,
                num_nodes=settings.num_nodes,
                strategy=strategy.processes,
            )
            require_known_gpu(strategy.root_device, strategy.dtype)
            for policy, engine in prepared.engines.own.items() if prepared.generates else ():
                with about(engine):
                    if strategy.float32_head:
                        engine.use_float32_head()
                    engine.check_model(prepared.configs[policy])
                    if any(handles(module)[user].replays_routing for user in prepared.engines.users(policy)):
                        engine.tell_experts()
                    engine.check_device(strategy.root_device)
            was_scanned = prepared.is_scanned
            if was_scanned:
                check_rows(prepared)
            startup.passed("data")
            results: Result = fabric.launch(run)
        return results
