"""What each rank of a run sets up before it trains or validates: who meets whom, its engine, its part in syncs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import yaml

from rlflow.controller.context import NodeContext
from rlflow.controller.probe import probing_group
from rlflow.controller.syncing import WeightSync, sending_group
from rlflow.dag.node import ROLLOUT
from rlflow.dag.tasks import SyncWeights
from rlflow.databuffer.transport import Transport
from rlflow.loggers.secrets import without_secrets
from rlflow.memory.out_of_memory import memory_watched, to_generate, to_load
from rlflow.module import handles
from rlflow.rollout.engine import RolloutEngine
from rlflow.rollout.engines import engine_of_rank
from rlflow.run.agreement import agree, facts
from rlflow.run.folder import RunFolder
from rlflow.run.prepared import Prepared
from rlflow.run.samples import Samples


@dataclass(frozen=True)
class Joined:
    """One rank of a run, which has met the others.

    Attributes:
        prepared: The run.
        transport: To the other ranks.
        samples: That the loggers will have.
        engine: Of this rank; None where it generates nothing.
        context: That the module is attached to.
        sync_task: What brings weights to the engines, in the plan or for validation alone; None without engines.
        config: As resolved, without secrets; None for a run without one.
    """

    prepared: Prepared
    transport: Transport
    samples: Samples
    engine: RolloutEngine | None
    context: NodeContext
    sync_task: SyncWeights | None
    config: Mapping[str, Any] | None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and speaks."""
        return self.transport.rank == 0

    def open_folder(self, goes_on: bool = False) -> RunFolder:
        """The run's folder, in which nothing lies unless the run `goes_on` in it; called by all ranks."""
        folder = RunFolder(self.prepared.settings.run_dir)
        if self.is_first and not goes_on:
            folder = RunFolder.open(folder.path)
            if self.config is not None:
                folder.config.write_text(yaml.safe_dump(dict(self.config), sort_keys=False))
        self.prepared.strategy.barrier()
        return folder

    def load(self, role: str, updates: int | None = None) -> None:
        """Load a role's model, on the ranks that hold it.

        Args:
            role: Its name.
            updates: That its optimizer will make; None for a role that is not trained.
        """
        strategy = self.prepared.strategy
        if strategy.holds(role):
            with memory_watched(f"loading `{role}`", partial(to_load, strategy), strategy):
                strategy.setup_role(role, handles(self.prepared.module)[role], self.prepared.paths[role], updates)

    def set_up_engine(self) -> None:
        """Load the engine of this rank, if it has one."""
        if self.engine is None:
            return
        prepared, strategy = self.prepared, self.prepared.strategy
        with memory_watched("setting up the rollout engine", partial(to_generate, strategy, prepared.engine), strategy):
            self.engine.setup(
                str(prepared.paths[prepared.lead]),
                dtype=strategy.dtype,
                device=strategy.root_device,
                rank=self.transport.rank,
                world_size=self.transport.world_size,
                local_rank=strategy.local_rank,
                seed=prepared.settings.seed,
            )
        self.engine.check_context(prepared.longest_prompt, prepared.module.max_response_length)

    def weight_sync(self) -> WeightSync | None:
        """This rank's part in bringing weights to engines, if it has one."""
        task, prepared = self.sync_task, self.prepared
        if task is None or self.transport.rank not in task.ranks:
            return None
        bucket_bytes = prepared.settings.sync_bucket_bytes
        return WeightSync(task, prepared.strategy, self.engine, self.transport, bucket_bytes)


def join(prepared: Prepared, resolved_config: str | None) -> Joined:
    """Every rank is here for the same run; then those meet that have work together. Called by all ranks.

    Args:
        prepared: The run, which every rank planned alike.
        resolved_config: YAML; None for a run without a config.

    Raises:
        UserError: A rank was started for another run.
    """
    settings, strategy, rollout = prepared.settings, prepared.strategy, prepared.layouts[ROLLOUT]
    _seed(settings.seed)
    transport = Transport(strategy.root_device, strategy.timeout)
    config = None if resolved_config is None else without_secrets(yaml.safe_load(resolved_config))
    _agree(prepared, transport, config)
    sync_task = _sync_task(prepared)
    samples = Samples(transport, rollout.ranks[0], prepared.decode)
    groups = [*prepared.plan.groups(), *(layout.ranks for layout in prepared.layouts.values())]
    groups += [samples.group]
    groups += [rollout.peers(shard) for shard in range(rollout.shards)]
    if sync_task is not None:
        groups += [sending_group(sync_task), probing_group(sync_task)]
    transport.form_groups(groups)
    strategy.form_groups(prepared.layouts)
    engine = engine_of_rank(prepared.engine, rollout, transport) if prepared.generates else None
    context = NodeContext(
        engine=engine,
        transport=transport,
        device=strategy.root_device,
        dtype=strategy.dtype,
        seed=settings.seed,
        stop_token_ids=prepared.stop_token_ids,
        decode=prepared.decode,
        on_scores=samples.keep,
        rows_of=prepared.train.rows_of,
    )
    prepared.module.attach(context)
    return Joined(prepared, transport, samples, engine, context, sync_task, config)


def _agree(prepared: Prepared, transport: Transport, config: Mapping[str, Any] | None) -> None:
    numbers = {
        "seed": prepared.settings.seed,
        "steps": prepared.steps,
        "training rows": prepared.train.size,
    }
    data = {"training": prepared.train, "validation": prepared.validation}
    digests = {f"{kind} data {of.scan.source}": of.scan.digest[:12] for kind, of in data.items() if of is not None}
    written = None if config is None else yaml.safe_dump(dict(config), sort_keys=False)
    agree(transport, facts(prepared.module, written, str(prepared.plan), **numbers, **digests))


def _sync_task(prepared: Prepared) -> SyncWeights | None:
    layouts, follows = prepared.layouts, prepared.follows
    if not prepared.generates or follows is None:
        return None
    return SyncWeights(follows, layouts[follows].ranks, layouts[ROLLOUT].ranks)


def _seed(seed: int) -> None:
    """The generators of Python, numpy and torch in this process."""
    from lightning.fabric import seed_everything  # by now without the rest of Lightning, see `rlflow.process.deferred`

    seed_everything(seed, verbose=False)
