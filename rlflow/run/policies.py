"""From a run as planned to the policies that generate on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from rlflow.callbacks.hooks import Callbacks
from rlflow.controller.gap import LogprobGap
from rlflow.controller.policies import Policies, Policy
from rlflow.controller.probe import Probe
from rlflow.controller.syncing import WeightSync
from rlflow.dag.graph import Graph
from rlflow.dag.tasks import SyncWeights
from rlflow.models.causal_lm import Averaged, CausalLM
from rlflow.models.stored_weights import stored_weights
from rlflow.module import handles
from rlflow.rollout.engine import RolloutEngine
from rlflow.run.prepared_run import Prepared
from rlflow.run.setup import Joined
from rlflow.values.rollout import Rollout


@dataclass(frozen=True)
class PolicyBuilder:
    """Builds what one rank knows of the policies.

    Attributes:
        joined: The rank.
    """

    joined: Joined

    @property
    def prepared(self) -> Prepared:
        """The run as planned."""
        return self.joined.prepared

    def policies(self, callbacks: Callbacks) -> Policies:
        """All of them, and the alarm of each whose weights change set."""
        prepared = self.prepared
        built = [self._policy(task) for task in prepared.syncs().values()] if prepared.generates else []
        return Policies(built, prepared.engines.shared, prepared.plan.max_staleness, callbacks)

    def sync(self, task: SyncWeights) -> WeightSync | None:
        """This rank's part in bringing weights to engines, if it has one.

        Args:
            task: Of the policy.
        """
        strategy, transport = self.prepared.strategy, self.joined.transport
        if transport.rank not in task.ranks:
            return None
        engine, bucket_bytes = self.joined.engines.by_policy.get(task.policy), self.prepared.settings.sync_bucket_bytes
        files: Callable[[], Iterator[list[tuple[str, Tensor]]]] | None = None
        if not task.source:
            path = self.prepared.policies[task.policy]
            trusted = handles(self.prepared.module)[task.policy].trust_remote_code
            files = partial(stored_weights, path, strategy.dtype, bucket_bytes, trusted)
        engines = self.prepared.engines
        alone = engines.owner(task.policy) == task.policy and engines.users(task.policy) == (task.policy,)
        keeps = not task.source and alone
        return WeightSync(task, strategy, engine, transport, bucket_bytes, files, keeps)

    def _policy(self, task: SyncWeights) -> Policy:
        name, graph = task.policy, self.prepared.graph
        engine, sync = self.joined.engines.by_policy.get(name), self.sync(task)
        if not task.source:
            return Policy(name, engine, sync)
        handle = handles(self.prepared.module)[name]
        assert isinstance(handle, CausalLM)
        several = len(self.prepared.policies) > 1
        made_by = frozenset(node.id for node in graph.order if node.generates == (name,))
        limit, dtype = self.prepared.settings.logprob_gap_limit, self.prepared.strategy.dtype
        kind = type(self.prepared.engines[name]).__name__
        gap = LogprobGap(limit, dtype, name if several else "", made_by if several else None, kind)
        handle.watch = gap.observe
        changes = sum(name in graph.changed_by(node) for node in graph.order)
        start = handle.owner.start_step if isinstance(handle, Averaged) else handle.start_step
        probe = self._probe(task, handle, engine, gap) if self._needs_probe(name) else None
        return Policy(name, engine, sync, changes, start, gap, probe)

    def _needs_probe(self, name: str) -> bool:
        """Where steps overlap, or responses go on from older ones, few rows or none are of the trainer's own version.

        Nor are they where its model does not score them before it changes. So a few are made to be compared.
        """
        plan = self.prepared.plan
        return bool(plan.max_staleness) or plan.cuts_off or not scores_its_rows(name, self.prepared.graph)

    def _probe(self, task: SyncWeights, handle: CausalLM, engine: RolloutEngine | None, gap: LogprobGap) -> Probe:
        some = self.prepared.train.first()
        prompts = [row.tolist() for row in some.prompt_ids.rows()]
        temperature, longest = handle.temperature, self.prepared.module.max_response_length
        seed, transport = self.prepared.settings.seed, self.joined.transport
        return Probe(task, handle, engine, transport, gap, prompts, temperature, longest, seed)


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
