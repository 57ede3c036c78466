"""From a run as planned to the policies that generate on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from rlflow.callbacks.hooks import Callbacks
from rlflow.controller.gap import LogprobGap, default_gap_limit
from rlflow.controller.policies import Policies, Policy
from rlflow.controller.probe import Probe
from rlflow.controller.syncing import WeightSync
from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH
from rlflow.dag.tasks import SyncWeights
from rlflow.models.causal_lm import CausalLM
from rlflow.models.stored_weights import stored_weights
from rlflow.module import handles
from rlflow.rollout.engine import RolloutEngine
from rlflow.run.prepared import Prepared
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
        """All of them, and the alarm of each that is trained set."""
        prepared = self.prepared
        built = [self._policy(task) for task in prepared.syncs().values()] if prepared.generates else []
        return Policies(built, prepared.engines.shared, prepared.plan.max_staleness, callbacks)

    def sync(self, task: SyncWeights, trained: bool = True) -> WeightSync | None:
        """This rank's part in bringing weights to engines, if it has one.

        Args:
            task: Of the policy.
            trained: Whether the ranks that train hold the weights; else engines read the policy's files.
        """
        strategy, transport = self.prepared.strategy, self.joined.transport
        if transport.rank not in task.ranks:
            return None
        engine, bucket_bytes = self.joined.engines.by_policy.get(task.policy), self.prepared.settings.sync_bucket_bytes
        files: Callable[[], Iterator[list[tuple[str, Tensor]]]] | None = None
        if not trained or not task.source:
            path = self.prepared.policies[task.policy]
            files = partial(stored_weights, path, strategy.dtype, bucket_bytes)
        return WeightSync(task, strategy, engine, transport, bucket_bytes, files)

    def _policy(self, task: SyncWeights) -> Policy:
        name, graph = task.policy, self.prepared.graph
        engine, sync = self.joined.engines.by_policy.get(name), self.sync(task)
        if not task.source:
            return Policy(name, engine, sync)
        handle = handles(self.prepared.module)[name]
        assert isinstance(handle, CausalLM)
        several = len(self.prepared.policies) > 1
        made_by = rows_of(name, graph)
        gap = LogprobGap(self._gap_limit, name if several else "", made_by if several else None)
        handle.watch = gap.observe
        updates = sum(node.kind == "train" and node.role == name for node in graph.order)
        probe = self._probe(task, handle, engine, gap) if self._needs_probe(name, made_by) else None
        return Policy(name, engine, sync, updates, handle.start_step, gap, probe)

    @property
    def _gap_limit(self) -> float:
        limit = self.prepared.settings.logprob_gap_limit
        return default_gap_limit(self.prepared.strategy.dtype) if limit is None else limit

    def _needs_probe(self, name: str, made_by: frozenset[str]) -> bool:
        """Where steps overlap, or responses go on from older ones, few rows or none are of the trainer's own version.

        Nor are they where the policy's model never scores what it alone generated. So a few are made to be compared.
        """
        plan, graph = self.prepared.plan, self.prepared.graph
        if plan.max_staleness or plan.cuts_off:
            return True
        scored = (value for node in graph.order if node.role == name for value in node.reads)
        read = {graph.space_of(value) for value in scored if graph.type_of(value) is Rollout}
        return bool(graph.policies()) and read.isdisjoint(made_by)

    def _probe(self, task: SyncWeights, handle: CausalLM, engine: RolloutEngine | None, gap: LogprobGap) -> Probe:
        some = self.prepared.train.first()
        prompts = [row.tolist() for row in some.prompt_ids.rows()]
        temperature, longest = handle.temperature, self.prepared.module.max_response_length
        seed, transport = self.prepared.settings.seed, self.joined.transport
        return Probe(task, handle, engine, transport, gap, prompts, temperature, longest, seed)


def rows_of(policy: str, graph: Graph) -> frozenset[str]:
    """The rows that this policy alone generates: spaces of their own, and the prompts' where it keeps these."""
    alone = [node for node in graph.order if node.generates == (policy,)]
    return frozenset({node.id for node in alone} | {BATCH for node in alone if node.samples_in_place})
