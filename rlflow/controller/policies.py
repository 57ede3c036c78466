"""The policies that generate: engine, weight sync, version of the weights, and the check that the engine has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlflow.callbacks.callback import Callback
from rlflow.callbacks.hooks import Callbacks
from rlflow.controller.gap import LogprobGap, probe
from rlflow.controller.run import Run
from rlflow.controller.weight_sync import WeightSync, weight_sync
from rlflow.dag.graph import Graph
from rlflow.dag.tasks import SyncWeights
from rlflow.metrics import StepMetrics
from rlflow.models.causal_lm import Averaged, CausalLM
from rlflow.module import handles
from rlflow.rollout.engine import NO_VERSION, RolloutEngine
from rlflow.values.rollout import Rollout


@dataclass(frozen=True)
class Policy:
    """A policy that generates, as one rank sees it.

    The version of its weights counts how often nodes have changed them: with two train nodes per step and `start_step`
    10 it is 0 up to step 10 (from 0), then 2, 4, 6, ... Skipped updates count too.

    Attributes:
        name: Name of the policy, which is the role of its model.
        engine: Rollout engine on this rank; None where this rank does not generate with the policy.
        sync: Sends the weights to the engines; None on ranks without a part in it.
        changes_per_step: Nodes per step that change the weights; 0 for a frozen policy.
        start_step: First step that changes the weights, from 0.
        gap: Compares logprobs of engine and trainer, and ends the run if weights are wrong; None for a frozen policy.
        probe: Function that generates rows for this comparison after each sync, given the version and the step's
            metrics; None where the steps' own rows serve.
    """

    name: str
    engine: RolloutEngine | None
    sync: WeightSync | None
    changes_per_step: int = 0
    start_step: int = 0
    gap: LogprobGap | None = None
    probe: Callable[[int, StepMetrics], None] | None = None

    def version_after(self, steps: int) -> int:
        """The version of the weights after so many steps: 0 until `start_step`, then `changes_per_step` more each."""
        return self.changes_per_step * max(0, steps - self.start_step)

    def compare(self, version: int, metrics: StepMetrics) -> None:
        """Log the last sync if no step has yet, and begin to compare logprobs with the engines'; by all its ranks."""
        if self.gap is not None and self.probe is None:
            self.gap.open(version, metrics)
        if self.sync is None or self.sync.is_logged:
            return
        if self.probe is not None:
            self.probe(version, metrics)
        if self.sync.report is not None:
            metrics.number("sync/verified_tensors", float(self.sync.report.tensors))
        self.sync.is_logged = True

    def sleep(self) -> None:
        """Let the engines free their memory, and the weights if training changes them; on all ranks of the sync."""
        if self.sync is not None:
            self.sync.sleep()

    def forget(self) -> None:
        """Note that the engines hold other weights, or none, so that the next `bring` sends them."""
        if self.sync is not None:
            self.sync.version = NO_VERSION


class Policies(dict[str, Policy]):
    """All policies of a run by name, as this rank knows them, in the same order on every rank.

    Args:
        run: The run on this rank.
        callbacks: Called when weights are sent.
    """

    def __init__(self, run: Run, callbacks: Callbacks) -> None:
        self._run = run
        self._callbacks = callbacks
        tasks = run.syncs().values() if run.generates else ()
        super().__init__({task.policy: _policy(run, task) for task in tasks})

    def versions_of(self, step: int, changed: Mapping[str, int]) -> dict[str, int]:
        """The version of each policy that generates rows of `step`: the weights after the last step trained by then.

        For one train node and `max_staleness` 2 these are 0 0 0 1 2 3 in the steps 0 to 5.

        Args:
            step: Number of the step, from 0.
            changed: How often this step changes a policy's weights before it generates, by policy.
        """
        return {name: self._version(name, step, changed.get(name, 0)) for name in self}

    def sync(self, name: str, step: int, metrics: StepMetrics, changed: int = 0) -> None:
        """Send the weights that generate rows of `step`, see `versions_of`; called by all ranks of the sync."""
        version = self._version(name, step, changed)
        self._bring(name, version)
        self[name].compare(version, metrics)

    def bring(self, name: str, steps: int) -> None:
        """For validation, send a policy's weights after `steps` steps to its engines; called by all ranks.

        The next step logs and compares them, so that a run which resumes between the two logs the same.
        """
        if self[name].sync is not None:
            self._bring(name, self[name].version_after(steps))

    def _version(self, name: str, step: int, changed: int) -> int:
        policy = self[name]
        begun = step >= policy.start_step
        return policy.version_after(max(0, step - self._run.plan.max_staleness)) + (changed if begun else 0)

    def _bring(self, name: str, version: int) -> None:
        """Send the trainer's weights to the engines, or wake these up if they have `version`; by all ranks of the sync.

        Each engine reads back what it was given, and compares it tensor by tensor.
        """
        policy, owner = self[name], self._run.engines.owner
        assert policy.sync is not None, name
        if policy.sync.version == version:
            policy.sync.wake_up()
            return
        policy.sync.run(version)
        if policy.engine is not None:
            self._callbacks.call(Callback.on_weight_sync, name, version)
        for other in self:
            if other != name and owner(other) == owner(name):
                self[other].forget()  # its turn in the engine is over

    def scored(self, role: str) -> None:
        """Note that a node has scored rows with a role; once logprobs were compared, the step compares no more."""
        if role in self and (gap := self[role].gap) is not None:
            gap.close(if_compared=True)

    def before_update(self, role: str) -> None:
        """Note that a role's weights are about to change, after which its logprobs are not comparable."""
        if role in self and (gap := self[role].gap) is not None:
            gap.close()

    def state_dict(self) -> dict[str, Any]:
        """The logprob gaps of earlier steps, by policy; JSON-able and the same on every rank."""
        return {policy.name: policy.gap.state_dict() for policy in self.values() if policy.gap is not None}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take back what `state_dict` gave; policies may have come and gone."""
        for policy in self.values():
            if policy.gap is not None and policy.name in state:
                policy.gap.load_state_dict(state[policy.name])

    def check(self, reduced: dict[str, float]) -> None:
        """Stop the run if a policy's engines did not generate with the trainer's weights.

        Args:
            reduced: The step's metrics over all ranks; those of the comparison are added.

        Raises:
            UserError: The logprobs of an engine differ too much from the trainer's; on all ranks.
        """
        for policy in self.values():
            if policy.gap is not None:
                policy.gap.check(reduced)


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
    # With `max_staleness` or `partial_rollout` few rows of a step or none are of the trainer's version.
    served = scores_its_rows(name, graph) and not (run.plan.max_staleness or run.plan.cuts_off)
    if served:
        return Policy(name, engine, sync, changes, start, gap)
    (prompt,) = run.train.first().prompt_ids.rows()
    return Policy(name, engine, sync, changes, start, gap, partial(probe, run, task, gap, prompt.tolist()))


def scores_its_rows(policy: str, graph: Graph) -> bool:
    """Whether a policy's model scores rows that it alone generated with each of a step's weights, before they change.

    Args:
        policy: Name of the policy.
        graph: Graph of the module.
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
