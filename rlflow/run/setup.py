"""What each rank of a run sets up before it trains or validates: who meets whom, its engine, its part in syncs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import yaml

from rlflow.controller.context import NodeContext
from rlflow.controller.probe import probing_group
from rlflow.controller.syncing import sending_group
from rlflow.databuffer.transport import Transport
from rlflow.environments.conversation_format import ConversationFormat
from rlflow.errors import about
from rlflow.loggers.secrets import without_secrets
from rlflow.memory.out_of_memory import memory_watched, to_generate, to_load
from rlflow.models.file_digest import model_files
from rlflow.module import handles
from rlflow.rollout.engine import EnginePlace, RolloutEngine
from rlflow.rollout.rank_engines import RankEngines, engines_of_rank
from rlflow.run.all_ranks import attempt
from rlflow.run.consistency import agree, facts
from rlflow.run.folder import RunFolder
from rlflow.run.folder_lock import FolderLock, require_own
from rlflow.run.prepared_run import Prepared
from rlflow.run.samples import Samples


@dataclass(frozen=True)
class Joined:
    """One rank of a run, which has met the others.

    Attributes:
        prepared: The run.
        transport: To the other ranks.
        samples: That the loggers will have.
        engines: Of this rank, by policy.
        context: That the module is attached to.
        config: As resolved, without secrets; None for a run without one.
    """

    prepared: Prepared
    transport: Transport
    samples: Samples
    engines: RankEngines
    context: NodeContext
    config: Mapping[str, Any] | None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and speaks."""
        return self.transport.rank == 0

    @contextmanager
    def locked_folder(self) -> Iterator[FolderLock]:
        """Within, no other run has the run's folder, which rank 0 locks; called by all ranks.

        It is as it was before where the run ends before `open_folder`.

        Raises:
            UserError: Another run has it, or it is no run's.
        """
        folder = self.prepared.settings.run_dir
        lock = FolderLock(folder)

        def take() -> None:
            if self.is_first:
                require_own(folder)
                lock.take()

        try:
            attempt(self.transport, folder, take)
            yield lock
        finally:
            lock.release()

    def open_folder(self, lock: FolderLock, goes_on: bool = False) -> RunFolder:
        """The run's folder, in which nothing lies unless the run `goes_on` in it; called by all ranks.

        Args:
            lock: That is held on it.
            goes_on: Whether the run goes on in what lies there.
        """
        folder = RunFolder(self.prepared.settings.run_dir)
        lock.use()

        def make() -> None:
            if self.is_first and not goes_on:
                RunFolder.open(folder.path)
                lock.take()
                if self.config is not None:
                    folder.config.write_text(yaml.safe_dump(dict(self.config), sort_keys=False))

        attempt(self.transport, folder.path, make)
        return folder

    def load(self, role: str, updates: int | None = None) -> None:
        """Load a role's model, on the ranks that hold it.

        Args:
            role: Its name.
            updates: That its optimizer will make; None for a role that is not trained.
        """
        strategy = self.prepared.strategy
        if strategy.holds(role):
            handle = handles(self.prepared.module)[role]
            with memory_watched(f"loading `{role}`", partial(to_load, strategy), strategy), about(handle):
                strategy.setup_role(role, handle, self.prepared.paths[role], updates)

    @property
    def validating(self) -> RolloutEngine | None:
        """What generates on this rank with the policy that validation is of, if anything does."""
        follows = self.prepared.follows
        return None if follows is None else self.engines.by_policy.get(follows)

    def set_up_engines(self) -> None:
        """Build this rank's engines. Where there are several, each sleeps before the next takes its memory."""
        prepared, strategy, engines = self.prepared, self.prepared.strategy, self.engines.own
        place = EnginePlace(
            strategy.dtype,
            strategy.root_device,
            self.transport.rank,
            self.transport.world_size,
            strategy.local_rank,
            prepared.settings.seed,
        )
        for policy, engine in engines.items():
            of = f" of `{policy}`" if len(engines) > 1 else ""
            remedies = partial(to_generate, strategy, engine)
            with memory_watched(f"setting up the rollout engine{of}", remedies, strategy), about(engine):
                trusted = handles(prepared.module)[policy].trust_remote_code
                engine.setup(str(prepared.policies[policy]), replace(place, trust_remote_code=trusted))
                if len(engines) > 1:
                    engine.sleep()
        self.engines.check_context(prepared.longest_prompt, prepared.module.max_response_length)


def join(prepared: Prepared, resolved_config: str | None) -> Joined:
    """Every rank is here for the same run; then those meet that have work together. Called by all ranks.

    Args:
        prepared: The run, which every rank planned alike.
        resolved_config: YAML; None for a run without a config.

    Raises:
        UserError: A rank was started for another run.
    """
    settings, strategy = prepared.settings, prepared.strategy
    _seed(settings.seed)
    transport = Transport(strategy.root_device, strategy.timeout)
    config = None if resolved_config is None else without_secrets(yaml.safe_load(resolved_config))
    _agree(prepared, transport, config)
    samples = Samples(
        transport,
        prepared.generating.ranks[0],
        prepared.decode,
        prepared.decode_with_special,
        prepared.train.rows_of,
    )
    groups = [*prepared.plan.groups(), *(layout.ranks for layout in prepared.layouts.values())]
    groups += [samples.group]
    placed = prepared.engine_layouts()
    groups += [engine.peers(shard) for engine in placed.values() for shard in range(engine.shards)]
    for task in prepared.syncs().values() if prepared.generates else ():
        groups += [task.ranks, sending_group(task), probing_group(task)]
    transport.form_groups(groups)
    strategy.form_groups(prepared.layouts)
    engines = RankEngines({}, {})
    if prepared.generates:
        engines = engines_of_rank(prepared.engines, placed, transport, strategy.root_device.type == "cpu")
    context = NodeContext(
        engines=engines.by_policy,
        transport=transport,
        device=strategy.root_device,
        dtype=strategy.dtype,
        seed=settings.seed,
        stop_token_ids=prepared.stop_token_ids,
        decode=prepared.decode,
        encode=prepared.train.encode.tokens,
        written=prepared.train.encode.written,
        on_scores=samples.keep,
        rows_of=prepared.train.rows_of,
        conversation_format=ConversationFormat(
            prepared.bridges, prepared.train.encode.messages, prepared.data.max_prompt_length
        ),
        writers={node.id: node.generates for node in prepared.graph.order},
        longest_prompt=prepared.data.max_prompt_length,
    )
    prepared.module.attach(context)
    return Joined(prepared, transport, samples, engines, context, config)


def _agree(prepared: Prepared, transport: Transport, config: Mapping[str, Any] | None) -> None:
    numbers = {
        "seed": prepared.settings.seed,
        "steps": prepared.steps,
        "training rows": prepared.train.size,
    }
    data = {"training": prepared.train, "validation": prepared.validation}
    digests = {f"{kind} data {of.scan.source}": of.scan.digest[:12] for kind, of in data.items() if of is not None}
    written = None if config is None else yaml.safe_dump(dict(config), sort_keys=False)
    models = {role: model_files(path) for role, path in (prepared.policies | prepared.paths).items()}
    agree(transport, facts(prepared.module, written, str(prepared.plan), models, **numbers, **digests))


def _seed(seed: int) -> None:
    """The generators of Python, numpy and torch in this process."""
    from lightning.fabric import seed_everything  # by now without the rest of Lightning, see `rlflow.process.deferred`

    seed_everything(seed, verbose=False)
