"""The set-up of a rank before it trains or validates: process groups, the run's folder, models and engines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import yaml

from rlflow.config.command_line import as_yaml
from rlflow.context.conversations import ConversationRunner
from rlflow.context.node_context import NodeContext
from rlflow.controller.gap import probing_group
from rlflow.controller.logged_samples import Samples
from rlflow.controller.run import Run
from rlflow.controller.weight_sync import sending_group
from rlflow.databuffer.transport import Transport
from rlflow.errors import about
from rlflow.loggers.secrets import without_secrets
from rlflow.memory.out_of_memory import memory_watched, to_generate, to_load
from rlflow.module import RLModule, handles
from rlflow.rollout.assignment import RankEngines, engines_of_rank
from rlflow.rollout.engine import RankInfo
from rlflow.run.agreement import agree, attempt, facts, model_files
from rlflow.run.folder import FolderLock, RunFolder, require_own
from rlflow.run.schedules import counted
from rlflow.strategies.distributed import TIMEOUT_S


def join(run: Run, resolved_config: str | None) -> None:
    """Check that every rank was started for this run, and form the process groups; called by all ranks.

    It sets the attributes of `run` that need the other ranks, such as `transport` and `context`.

    Args:
        run: The run, which every rank has planned in the same way.
        resolved_config: Config as YAML; None for a run without a config.

    Raises:
        UserError: A rank was started for another run.
    """
    from lightning.fabric import seed_everything  # without the rest of Lightning, see `rlflow.process.deferred`

    settings, strategy = run.settings, run.strategy
    seed_everything(settings.seed, verbose=False)
    run.transport = transport = Transport(strategy.root_device, strategy.timeout)
    run.config = config = None if resolved_config is None else without_secrets(yaml.safe_load(resolved_config))
    _agree(run, transport, config)
    run.samples = samples = Samples(
        transport,
        run.generating.ranks[0],
        run.decode,
        run.decode_with_special,
        run.train.rows_of,
        settings.log_samples,
        run.train.encode.picture_names,
    )
    groups = [*run.plan.groups(), *(layout.ranks for layout in run.layouts.values())]
    groups += [samples.group]
    placed = run.engine_layouts()
    groups += [engine.peers(shard) for engine in placed.values() for shard in range(engine.shards)]
    for task in run.syncs().values() if run.generates else ():
        groups += [task.ranks, sending_group(task), probing_group(task)]
    transport.form_groups(groups)
    strategy.form_groups(run.layouts)
    run.rank_engines = RankEngines({}, {})
    if run.generates:
        on_cpu = strategy.root_device.type == "cpu"
        timeout_s = strategy.timeout.total_seconds() if strategy.timeout else TIMEOUT_S
        run.rank_engines = engines_of_rank(run.engines, placed, transport, on_cpu, timeout_s)
    dtype = torch.float64 if strategy.dtype == torch.float64 else torch.float32  # of rewards and rollout logprobs
    encode, album = run.train.encode, run.album
    for handle in handles(run.module).values():
        handle.album = album
    run.context = NodeContext(
        engines=run.rank_engines.by_policy,
        transport=transport,
        device=strategy.root_device,
        dtype=dtype,
        seed=settings.seed,
        stop_token_ids=run.stop_token_ids,
        decode=run.decode,
        encode=encode.tokens,
        written=encode.written,
        on_scores=samples.keep,
        rows_of=run.train.rows_of,
        album=album,
        conversations=ConversationRunner(
            encode.bridge,
            encode.messages,
            run.data.max_prompt_length,
            run.decode,
            dtype,
            settings.seed,
            transport,
            album,
            None if encode.processor is None else encode.processor.expand,
        ),
        writers={node.id: node.generates for node in run.graph.order},
        longest_prompt=run.data.max_prompt_length,
        prompt_column=run.data.prompt,
        trainer_state=run.trainer_state,
        reward=run.module.scorer,
        masks=run.train.masks,
        own_settings=run.train.own_settings,
        scored_as_made=run.scored_as_made,
    )
    run.module.attach(run.context)


def plain_hparams(module: RLModule) -> dict[str, Any]:
    """The hyperparameters of a module that are JSON-able, without secrets; not models, nor functions."""
    found = {}
    for name, value in module.hparams.items():
        with suppress(TypeError):
            found[name] = json.loads(json.dumps(value))
    return dict(without_secrets(found))


@contextmanager
def locked_folder(run: Run) -> Iterator[FolderLock]:
    """A context in which the run's folder is locked by rank 0, so that no other run uses it; called by all ranks.

    If the run ends before `open_folder`, the folder is as it was before.

    Raises:
        UserError: Another run has locked the folder, or it has files that no run made.
    """
    folder = run.settings.folder
    lock = FolderLock(folder)

    def take() -> None:
        if run.is_first:
            require_own(folder)
            lock.take()

    try:
        attempt(run.transport, folder, take)
        yield lock
    finally:
        lock.release()


def open_folder(run: Run, lock: FolderLock, resumes: bool = False) -> RunFolder:
    """Open the run's folder, which is empty unless the run resumes in it; called by all ranks.

    Args:
        run: The run.
        lock: The lock that is held on the folder.
        resumes: Whether the run resumes in the folder, so that its files stay.
    """
    folder = RunFolder(run.settings.folder)
    lock.use()

    def make() -> None:
        if run.is_first and not resumes:
            RunFolder.open(folder.path)
            lock.take()
            lock.use()  # once more for the new folder, since the old one was moved away
            if run.config is not None:
                folder.config.write_text(as_yaml(run.config))
            if hparams := plain_hparams(run.module):
                folder.hparams.write_text(json.dumps(hparams, indent=2) + "\n")

    attempt(run.transport, folder.path, make)
    return folder


def load_role(run: Run, role: str, updates: int | None = None) -> None:
    """Load a role's model, on the ranks that hold it.

    Args:
        run: The run.
        role: The role's name.
        updates: Number of updates that its optimizer will make; None for a role that is not trained.
    """
    strategy = run.strategy
    if strategy.holds(role):
        handle = handles(run.module)[role]
        with memory_watched(f"loading `{role}`", partial(to_load, strategy), strategy), about(handle):
            strategy.setup_role(role, handle, run.paths[role], updates)


def load_roles(run: Run) -> None:
    """Load the models of all roles on the ranks that hold them, with optimizers for those that are trained."""
    trained, prompts = run.graph.trained_roles(), run.data.prompts_per_step
    for role in run.paths:
        updates = counted(run.module, run.graph, role, prompts, run.steps) if role in trained else None
        load_role(run, role, updates)


def set_up_engines(run: Run) -> None:
    """Build this rank's engines. Each then sleeps until its first sync, as others and roles need the memory."""
    strategy, engines = run.strategy, run.rank_engines.own
    place = RankInfo(
        strategy.dtype,
        strategy.root_device,
        run.rank,
        run.transport.world_size,
        strategy.local_rank,
        run.settings.seed,
    )
    for policy, engine in engines.items():
        of = f" of `{policy}`" if len(engines) > 1 else ""
        remedies = partial(to_generate, strategy, engine)
        with memory_watched(f"setting up the rollout engine{of}", remedies, strategy), about(engine):
            trusted = handles(run.module)[policy].trust_remote_code
            engine.setup(str(run.policies[policy]), replace(place, trust_remote_code=trusted))
            engine.sleep()
    run.rank_engines.check_context(run.longest_prompt, run.module.max_response_length)


def _agree(run: Run, transport: Transport, config: Mapping[str, Any] | None) -> None:
    numbers = {"seed": run.settings.seed, "steps": run.steps, "training rows": run.train.size}
    data = {"training": run.train, "validation": run.validation}
    digests = {f"{kind} data {of.scan.source}": of.scan.digest[:12] for kind, of in data.items() if of is not None}
    written = None if config is None else yaml.safe_dump(dict(config), sort_keys=False)
    models = {role: model_files(path) for role, path in (run.policies | run.paths).items()}
    agree(transport, facts(run.module, written, str(run.plan), models, **numbers, **digests))
