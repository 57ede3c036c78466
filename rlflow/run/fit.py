"""One rank's run: what it builds, the loop over its steps, and what it leaves behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlflow.controller import Controller
from rlflow.controller.context import NodeContext
from rlflow.controller.gap import LogprobGap, default_gap_limit
from rlflow.controller.probe import Probe, probing_group
from rlflow.controller.syncing import WeightSync, sending_group
from rlflow.controller.validation import run_validation_step, validate
from rlflow.dag.node import ROLLOUT
from rlflow.dag.tasks import SyncWeights
from rlflow.data.prefetch import Prefetch
from rlflow.data.prompts import PromptData
from rlflow.databuffer.transport import Transport
from rlflow.loggers.console import Console
from rlflow.loggers.csv import CSVLogger
from rlflow.loggers.curves import draw_curves
from rlflow.loggers.jsonl import JSONLLogger
from rlflow.loggers.secrets import without_secrets
from rlflow.loggers.trace import Trace
from rlflow.memory.out_of_memory import memory_watched, to_generate, to_load, to_score
from rlflow.metrics import Metrics
from rlflow.models.causal_lm import CausalLM
from rlflow.module import RLModule, chooses_prompts, handles, has_validation_step
from rlflow.process import startup
from rlflow.process.freed_memory import keep_freed_memory, return_freed_memory
from rlflow.process.status import AT_FIRST, report
from rlflow.rollout.engine import RolloutEngine
from rlflow.rollout.engines import engine_of_rank
from rlflow.run.agreement import agree, facts
from rlflow.run.folder import RunFolder
from rlflow.run.memory_table import memory_table
from rlflow.run.prepare import Prepared, table, updates_of_run
from rlflow.run.samples import Samples
from rlflow.run.saving import Saving
from rlflow.run.summary import by_summary_name, closing_lines, compared, told
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.layout import Layout

if TYPE_CHECKING:
    from rlflow.trainer import Trainer


class Run:
    """Built on every rank once all are there; `run` trains, `validate` validates and no more.

    Args:
        trainer: The settings.
        module: The algorithm.
        data: Its prompts.
        prepared: The plan, which every rank made alike.
        strategy: Joined to the other ranks.
        engine: To be set up where the run generates.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: RLModule,
        data: PromptData,
        prepared: Prepared,
        strategy: TrainingStrategy,
        engine: RolloutEngine,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._data = data
        self._prepared = prepared
        self._strategy = strategy
        self._transport = Transport(strategy.root_device, strategy.timeout)
        self._configured_engine = engine
        self._engine: RolloutEngine | None = None
        self._first = self._transport.rank == 0
        self._metrics = Metrics()
        self._samples = Samples(self._transport, prepared.layouts[ROLLOUT].ranks[0], self._decode)
        self._summary: dict[str, Any] = {}
        resolved = trainer.resolved_config
        self._config = None if resolved is None else without_secrets(yaml.safe_load(resolved))
        self._saving = Saving(trainer, module, prepared, strategy, self._transport, self._metrics, self._samples)
        self._done = self._saving.done

    def run(self) -> dict[str, Any]:
        """Train to the end; the run's summary."""
        report(self._transport.rank, AT_FIRST)
        if self._strategy.root_device.type == "cpu":
            return_freed_memory() if self._strategy.divides_weights else keep_freed_memory()
        _seed(self._trainer.seed)
        self._meet()
        self._saving.require_unchanged()
        folder = self._open_folder(self._trainer.run_dir)
        with ExitStack() as stack:
            log = folder.logs / f"rank{self._transport.rank}.log"
            self._console = stack.enter_context(Console(log, self._prepared.steps, self._done, shows=self._first))
            trace = self._transport.watch = Trace(folder.traces, self._transport.rank, self._transport.world_size)
            stack.callback(trace.close)
            self._start_loggers(folder, stack)
            if chooses_prompts(self._module):
                self._prepared.train.choose_by(self._module.choose_prompts)
            draws = self._prepared.steps if self._prepared.plan.fill is None else None
            prompts = stack.enter_context(Prefetch(self._prepared.train, draws))
            try:
                self._train(folder, self._build(folder, trace, prompts))
            except BaseException as error:
                self._saving.abandon()
                for callback in self._trainer.callbacks:
                    callback.on_exception(self._trainer, error)
                raise
        if self._engine is not None:
            self._engine.close()
        self._strategy.barrier()  # rank 0, which ends last, serves the store by which the others say goodbye
        if self._first and not self._trainer.fast_dev_run:
            self._leave_behind(folder)
        return self._summary

    def validate(self) -> dict[str, Any]:
        """Validate the model of the config in a folder of its own; no optimizer is built.

        Returns:
            The metrics of one validation, and `problems`, the number of held-out prompts.
        """
        prepared, strategy, loader = self._prepared, self._strategy, self._prepared.validation
        assert loader is not None
        _seed(self._trainer.seed)
        self._meet()
        folder = self._open_folder(self._trainer.validation_dir)
        with Console(folder.logs / f"rank{self._transport.rank}.log", prepared.steps, shows=self._first):
            for role in prepared.paths if has_validation_step(self._module) else [prepared.lead]:
                if not strategy.holds(role):
                    continue
                handle = handles(self._module)[role]
                handle.freeze()
                strategy.setup_role(role, handle, prepared.paths[role])
            self._set_up_engine()
            sync = self._weight_sync()
            if sync is not None:
                sync.run(version=0)
            startup.end()
            metrics = self._measured(version=0)
            for callback in self._trainer.callbacks:
                callback.on_validation_end(self._trainer, 0, metrics)
        if self._engine is not None:
            self._engine.close()
        results = {"problems": loader.size, **metrics}
        if self._first:
            folder.validation.write_text(json.dumps(results, indent=2) + "\n")
            print(f"{handles(self._module)[prepared.lead].model} on {loader.size} held-out problems")
            for name, value in metrics.items():
                print(f"  {name:<22} {value:.4f}")
            config = "config.yaml, " if folder.config.exists() else ""
            print(f"left in {folder.path}/: validation.json, {config}logs/")
        return results

    def _meet(self) -> None:
        """Every rank is here for the same run; then those meet that have work together.

        Raises:
            UserError: One was started for another run.
        """
        prepared, transport = self._prepared, self._transport
        numbers = {"seed": self._trainer.seed, "steps": prepared.steps, "training rows": prepared.train.size}
        data = {"training": prepared.train, "validation": prepared.validation}
        digests = {f"{kind} data {of.scan.source}": of.scan.digest[:12] for kind, of in data.items() if of is not None}
        config = None if self._config is None else yaml.safe_dump(self._config, sort_keys=False)
        agree(transport, facts(self._module, config, str(prepared.plan), **numbers, **digests))
        rollout = prepared.layouts[ROLLOUT]
        groups = [*prepared.plan.groups(), *(layout.ranks for layout in prepared.layouts.values())]
        groups += [self._samples.group]
        groups += [rollout.peers(shard) for shard in range(rollout.shards)]
        if self._sync_task is not None:
            groups += [sending_group(self._sync_task), probing_group(self._sync_task)]
        transport.form_groups(groups)
        self._strategy.form_groups(prepared.layouts)
        if prepared.generates:
            self._engine = engine_of_rank(self._configured_engine, rollout, transport)
        self._context = NodeContext(
            engine=self._engine,
            transport=transport,
            metrics=self._metrics,
            device=self._strategy.root_device,
            dtype=self._strategy.dtype,
            seed=self._trainer.seed,
            stop_token_ids=prepared.stop_token_ids,
            decode=self._decode,
            on_scores=lambda rollout, scores: self._samples.keep(self._metrics.step, rollout, scores),
            rows_of=self._prepared.train.rows_of,
        )
        self._module.attach(self._context)

    @cached_property
    def _sync_task(self) -> SyncWeights | None:
        """What brings weights to the engines, in the plan or for validation alone; None without engines."""
        prepared = self._prepared
        if not prepared.generates or prepared.follows is None:
            return None
        layouts = prepared.layouts
        return SyncWeights(prepared.follows, layouts[prepared.follows].ranks, layouts[ROLLOUT].ranks)

    def _open_folder(self, path: Path) -> RunFolder:
        folder = RunFolder(path)
        resumed = self._saving.resumed
        goes_on = resumed is not None and resumed.is_relative_to(folder.path)
        if self._first and not goes_on:
            folder = RunFolder.open(path)
            if self._config is not None:
                folder.config.write_text(yaml.safe_dump(self._config, sort_keys=False))
        self._strategy.barrier()
        return folder

    def _start_loggers(self, folder: RunFolder, stack: ExitStack) -> None:
        own = [] if self._trainer.fast_dev_run else [JSONLLogger(), CSVLogger(), *self._trainer.loggers]
        self._loggers = own if self._first else []
        for logger in self._loggers:
            logger.start(folder.path, first_step=self._done + 1 if self._saving.resumed else 0)
            stack.callback(logger.finish)
            if self._config is not None:
                logger.log_config(self._config)

    def _build(self, folder: RunFolder, trace: Trace, prompts: Prefetch) -> Controller:
        trainer, prepared, strategy = self._trainer, self._prepared, self._strategy
        for line in table(self._module, self._data, prepared, self._transport.world_size, strategy.token_budget):
            self._console.say(line)
        for line in memory_table(
            self._module, self._data, prepared, strategy, self._configured_engine, trainer.devices
        ):
            self._console.say(line)
        startup.passed("ranks")
        trained = prepared.graph.trained_roles()
        for role, path in prepared.paths.items():
            updates = updates_of_run(self._module, role, self._data, prepared.steps) if role in trained else None
            if strategy.holds(role):
                with memory_watched(f"loading `{role}`", partial(to_load, strategy), strategy):
                    strategy.setup_role(role, handles(self._module)[role], path, updates)
        self._saving.require_space(folder)
        startup.passed("models")
        self._set_up_engine()
        startup.passed("engine")
        startup.collect_again()
        limit = trainer.logprob_gap_limit
        gap = LogprobGap(self._metrics, default_gap_limit(strategy.dtype) if limit is None else limit)
        if prepared.follows is not None:
            follows = handles(self._module)[prepared.follows]
            assert isinstance(follows, CausalLM)
            follows.watch = gap.observe
        controller = Controller(
            module=self._module,
            graph=prepared.graph,
            plan=prepared.plan,
            steps=prepared.steps,
            follows=prepared.follows,
            strategy=strategy,
            engine=self._engine,
            sync=self._weight_sync(),
            probe=self._probe(gap),
            loader=prompts,
            transport=self._transport,
            metrics=self._metrics,
            gap=gap,
            trace=trace,
            callbacks=trainer.callbacks,
            context=self._context,
            seed=trainer.seed,
            balance=trainer.balance,
            max_tokens_per_draw=trainer.partial_rollout,
            save=lambda done: self._saving.save_if_due(done, folder, controller),
        )
        self._saving.restore(controller)
        if self._saving.resumed is not None:
            self._console.say(f"continues {self._saving.resumed} after step {self._done}")
        return controller

    def _set_up_engine(self) -> None:
        if self._engine is None:
            return
        strategy = self._strategy
        remedies = partial(to_generate, strategy, self._configured_engine)
        with memory_watched("setting up the rollout engine", remedies, strategy):
            self._engine.setup(
                str(self._prepared.paths[self._prepared.lead]),
                dtype=strategy.dtype,
                device=strategy.root_device,
                rank=self._transport.rank,
                world_size=self._transport.world_size,
                local_rank=strategy.local_rank,
                seed=self._trainer.seed,
            )
        self._engine.check_context(self._prepared.longest_prompt, self._module.max_response_length)

    def _weight_sync(self) -> WeightSync | None:
        """This rank's part in bringing weights to engines, if it has one."""
        task = self._sync_task
        if task is None or self._transport.rank not in task.ranks:
            return None
        return WeightSync(task, self._strategy, self._engine, self._transport, self._trainer.sync_bucket_bytes)

    def _probe(self, gap: LogprobGap) -> Probe | None:
        """Where steps overlap, or responses go on from older ones, few rows or none are of the trainer's own version.

        So a few are made to be compared.
        """
        task, prepared = self._sync_task, self._prepared
        if task is None or not (prepared.plan.max_staleness or prepared.plan.cuts_off):
            return None
        follows = handles(self._module)[task.role]
        assert isinstance(follows, CausalLM)
        some = prepared.train.first()
        prompts = [row.tolist() for row in some.prompt_ids.rows()]
        temperature, longest = self._module.temperature, self._module.max_response_length
        seed = self._trainer.seed
        return Probe(task, follows, self._engine, self._transport, gap, prompts, temperature, longest, seed)

    def _train(self, folder: RunFolder, controller: Controller) -> None:
        trainer, steps = self._trainer, self._prepared.steps
        for callback in trainer.callbacks:
            callback.on_fit_start(trainer)
        after = {}
        if self._saving.resumed is None:
            after = self._saving.before = self._validate(controller, 0)
            startup.passed("validation")
        self._log(after, self._done)
        self._console.say(startup.end().line())
        self._console.begin()
        done = self._done
        while done < steps and not trainer.should_stop:
            metrics = controller.step(done)
            done += 1
            for callback in trainer.callbacks:
                callback.on_step_end(trainer, done, metrics)
            trainer.should_stop |= _too_long(metrics, trainer.max_seconds)
            last = done == steps or trainer.should_stop
            validates = last or (trainer.val_check_interval is not None and done % trainer.val_check_interval == 0)
            if validates:
                after = self._validate(controller, done)
                metrics |= after
            self._log(metrics, done, records=validates or done % trainer.log_every_n_steps == 0)
            controller.save(done)
        controller.close()
        self._saving.wait()
        saved = trainer.save_every_n_steps is not None and done > self._done  # with the last checkpoint
        if not saved and not trainer.fast_dev_run:
            self._saving.save_models(folder, done)
        for callback in trainer.callbacks:
            callback.on_fit_end(trainer)
        self._summary = {"steps": done, **compared(self._saving.before, after)}
        if self._prepared.validation is not None:
            self._summary["problems"] = self._prepared.validation.size

    def _validate(self, controller: Controller, done: int) -> dict[str, float]:
        if self._prepared.validation is None:
            return {}
        if self._prepared.scores_validation:
            controller.sync_for_validation(done)
        metrics = self._measured(controller.version_after(done))
        if not any(node.kind == "rollout" for node in self._prepared.graph.order):
            controller.sleep()  # else the next step's rollouts come first, and sleep follows them
        for callback in self._trainer.callbacks:
            callback.on_validation_end(self._trainer, done, metrics)
        return metrics

    def _measured(self, version: int) -> dict[str, float]:
        """Of the held-out rows: the scores of responses that policy `version` samples, and what the module measures."""
        report(self._transport.rank, "validation")
        prepared, module, loader = self._prepared, self._module, self._prepared.validation
        assert loader is not None
        metrics = {}
        if prepared.scores_validation:
            remedies = partial(to_generate, self._strategy, self._configured_engine)
            with memory_watched("validation, generating", remedies, self._strategy):
                metrics = validate(
                    module,
                    self._engine,
                    loader,
                    self._transport,
                    prepared.layouts[ROLLOUT],
                    samples=self._trainer.val_samples,
                    seed=self._trainer.seed,
                    version=version,
                    stop_token_ids=prepared.stop_token_ids,
                    decode=self._decode,
                )
        if has_validation_step(module):
            lead = prepared.layouts[prepared.lead]
            layout, device = Layout(lead.ranks, lead.shards), self._strategy.root_device
            with memory_watched("validation, `validation_step`", partial(to_score, self._strategy), self._strategy):
                metrics |= run_validation_step(module, self._context, loader, self._transport, layout, device)
        return metrics

    def _log(self, metrics: dict[str, float], done: int, records: bool = True) -> None:
        samples = self._samples.take(done - 1)
        for logger in self._loggers if records else ():
            if metrics:
                logger.log_metrics(metrics, done)
            if samples:
                logger.log_samples(samples, done)
        if done > self._done:
            self._console.step(done, metrics)
        elif metrics:
            shown = told(by_summary_name(metrics)).items()
            values = (f"{'greedy' if name == 'greedy_accuracy' else name} {value:.3f}" for name, value in shown)
            self._console.say(f"before training: {', '.join(values)}")

    def _decode(self, token_ids: Sequence[int]) -> str:
        text = self._prepared.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def _leave_behind(self, folder: RunFolder) -> None:
        """The files that sum the run up, and on the terminal where they are."""
        draw_curves(folder.path)
        started_from = self._prepared.paths[self._prepared.lead]
        self._summary = folder.write_summary(self._summary, started_from)
        for line in closing_lines(folder, self._summary):
            print(line)


def _seed(seed: int) -> None:
    """The generators of Python, numpy and torch in this process."""
    from lightning.fabric import seed_everything  # by now without the rest of Lightning, see `rlflow.process.deferred`

    seed_everything(seed, verbose=False)


def _too_long(metrics: dict[str, float], max_seconds: float | None) -> bool:
    """Decided from the ranks' largest, so by all alike."""
    return max_seconds is not None and metrics["time/elapsed"] >= max_seconds
