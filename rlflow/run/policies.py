"""From a run as planned to the policies that generate on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from rlflow.callbacks.hooks import Callbacks
from rlflow.controller.gap import LogprobGap
from rlflow.controller.policies import Policies, Policy, WeightSync
from rlflow.controller.probe import Probe
from rlflow.controller.run import Run
from rlflow.dag.graph import Graph
from rlflow.dag.tasks import SyncWeights
from rlflow.models.causal_lm import Averaged, CausalLM
from rlflow.models.scoring import stored_weights
from rlflow.module import handles
from rlflow.rollout.engine import RolloutEngine
from rlflow.values.rollout import Rollout


def policies_of(run: Run, callbacks: Callbacks) -> Policies:
    """All policies as this rank knows them, each with the alarm for wrong weights where its weights change."""
    built = [_policy(run, task) for task in run.syncs().values()] if run.generates else []
    return Policies(built, run.engines.shared, run.plan.max_staleness, callbacks)


def weight_sync(run: Run, task: SyncWeights) -> WeightSync | None:
    """This rank's part in bringing a policy's weights to its engines, if it has one.

    Args:
        run: The run.
        task: The sync of the policy.
    """
    if run.rank not in task.ranks:
        return None
    strategy, bucket_bytes = run.strategy, run.settings.sync_bucket_bytes
    engine = run.rank_engines.by_policy.get(task.policy)
    files: Callable[[], Iterator[list[tuple[str, Tensor]]]] | None = None
    if not task.source:
        path = run.policies[task.policy]
        trusted = handles(run.module)[task.policy].trust_remote_code
        files = partial(stored_weights, path, strategy.dtype, bucket_bytes, trusted)
    alone = run.engines.owner(task.policy) == task.policy and run.engines.users(task.policy) == (task.policy,)
    keeps = not task.source and alone
    return WeightSync(task, strategy, engine, run.transport, bucket_bytes, files, keeps)


def _policy(run: Run, task: SyncWeights) -> Policy:
    name, graph = task.policy, run.graph
    engine, sync = run.rank_engines.by_policy.get(name), weight_sync(run, task)
    if not task.source:
        return Policy(name, engine, sync)
    handle = handles(run.module)[name]
    assert isinstance(handle, CausalLM)
    several = len(run.policies) > 1
    made_by = frozenset(node.id for node in graph.order if node.generates == (name,))
    limit, dtype = run.settings.logprob_gap_limit, run.strategy.dtype
    kind = type(run.engines[name]).__name__
    gap = LogprobGap(limit, dtype, name if several else "", made_by if several else None, kind)
    handle.watch = gap.observe
    changes = sum(name in graph.changed_by(node) for node in graph.order)
    start = handle.owner.start_step if isinstance(handle, Averaged) else handle.start_step
    probe = _probe(run, task, handle, engine, gap) if _needs_probe(run, name) else None
    return Policy(name, engine, sync, changes, start, gap, probe)


def _needs_probe(run: Run, name: str) -> bool:
    """Whether some rows are generated only to be compared with the trainer's own model.

    Where steps overlap, or responses are continued from older ones, few rows or none are of the trainer's version; nor
    are they compared where its model does not score them before it changes.
    """
    return bool(run.plan.max_staleness) or run.plan.cuts_off or not scores_its_rows(name, run.graph)


def _probe(run: Run, task: SyncWeights, handle: CausalLM, engine: RolloutEngine | None, gap: LogprobGap) -> Probe:
    prompts = [row.tolist() for row in run.train.first().prompt_ids.rows()]
    temperature, longest = handle.temperature, run.module.max_response_length
    return Probe(task, handle, engine, run.transport, gap, prompts, temperature, longest, run.settings.seed)


def scores_its_rows(policy: str, graph: Graph) -> bool:
    """Whether a policy's model scores rows that it alone generated with each of a step's weights, before they change.

    Args:
        policy: Its name, which is its model's role.
        graph: Of the module.
    """
    generated: dict[int, set[str]] = {}  # by how often the step has changed the weights before
    scored: dict[int, set[str]] = {}
    for node in graph.order:
        changed = graph.changed_before(node)[policy]
        if policy in node.generates:
            generated.setdefault(changed, set()).update({node.id} if node.generates == (policy,) else ())
        if node.role == policy:
            rollouts = (value for value in node.reads if graph.type_of(value) is Rollout)
            scored.setdefault(changed, set()).update(graph.space_of(value) for value in rollouts)
    return all(rows & scored.get(changed, set()) for changed, rows in generated.items())
