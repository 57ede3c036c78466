"""The policies that generate: of each its engine, how weights get there, their version, and whether they are right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.callbacks.callback import Callback
from rlflow.callbacks.hooks import Callbacks
from rlflow.controller.gap import LogprobGap, Probe
from rlflow.controller.run import Run
from rlflow.controller.weight_sync import WeightSync, weight_sync
from rlflow.dag.graph import Graph
from rlflow.dag.tasks import SyncWeights
from rlflow.metrics import StepMetrics
from rlflow.models.causal_lm import Averaged, CausalLM
from rlflow.module import handles
from rlflow.rollout.engine import RolloutEngine
from rlflow.values.rollout import Rollout


@dataclass(frozen=True)
class Policy:
    """One policy, seen from one rank.

    Attributes:
        name: The role that it is.
        engine: Generates with it on this rank; None where none does.
        sync: Brings its weights to the engines; None on ranks that have no part in it.
        changes_per_step: How often a step changes its weights: its train nodes, 1 of an average; 0 where it is frozen.
        start_step: The first step that does, from 0.
        gap: The alarm for wrong weights in the engines; None where it is frozen.
        probe: Compares engine and trainer after each sync, where no step does so by itself; None where steps do.
    """

    name: str
    engine: RolloutEngine | None
    sync: WeightSync | None
    changes_per_step: int = 0
    start_step: int = 0
    gap: LogprobGap | None = None
    probe: Probe | None = None

    def version_after(self, steps: int) -> int:
        """The version of the weights after so many steps: how often they have changed."""
        return self.changes_per_step * max(0, steps - self.start_step)

    def bring(self, version: int, metrics: StepMetrics, callbacks: Callbacks | None, of_step: bool = True) -> bool:
        """Bring the engines to `version`, which the trainer has, unless they are; each verifies tensor by tensor.

        Args:
            version: Of the weights.
            metrics: Of the step.
            callbacks: Told if weights are sent.
            of_step: Whether a step generates with them. What validation has sent, the next step logs and compares, so
                that it logs the same in a run that goes on between the two.

        Returns:
            Whether weights were sent.
        """
        if self.sync is None:
            return False
        sends = self.sync.version != version
        if sends:
            report = self.sync.run(version)
            if report is not None and callbacks is not None:
                callbacks.call(Callback.on_weight_sync, self.name, version)
        else:
            self.sync.wake_up()
        if of_step:
            self._compare(self.sync, version, metrics)
        return sends

    def _compare(self, sync: WeightSync, version: int, metrics: StepMetrics) -> None:
        """Log what engines say of weights that no step has logged, and begin to compare what they generate."""
        reports = sync.take_reports()
        if self.gap is not None and self.probe is None:
            self.gap.open(version, metrics)
        if reports and self.probe is not None:
            self.probe.run(version, metrics)
        for report in reports:
            if report is not None:
                metrics.number("sync/verified_tensors", float(report.tensors))

    def sleep(self) -> None:
        """Let its engines give back their memory, and weights that training changes; all ranks of the sync call it."""
        if self.sync is not None:
            self.sync.sleep()

    def forget(self) -> None:
        """Its engines hold other weights, or none."""
        if self.sync is not None:
            self.sync.forget()


class Policies(Mapping[str, Policy]):
    """All policies of a run by name, as this rank knows them, in the same order on every rank.

    Args:
        run: The run on this rank.
        callbacks: Called when weights are sent.
    """

    def __init__(self, run: Run, callbacks: Callbacks) -> None:
        self._run = run
        self._callbacks = callbacks
        tasks = run.syncs().values() if run.generates else ()
        self._policies = {task.policy: _policy(run, task) for task in tasks}

    def __getitem__(self, name: str) -> Policy:
        return self._policies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __len__(self) -> int:
        return len(self._policies)

    def versions_of(self, step: int, changed: Mapping[str, int]) -> dict[str, int]:
        """The versions that generate rows of `step`: the weights after the last step trained by then.

        Args:
            step: From 0.
            changed: By policy: how often the step has changed its weights before.
        """
        return {name: self._version(name, step, changed.get(name, 0)) for name in self}

    def version_after(self, name: str | None, steps: int) -> int:
        """The version of a policy's weights after so many steps; 0 where it does not generate."""
        return self[name].version_after(steps) if name is not None and name in self else 0

    def bring(self, name: str, steps: int, metrics: StepMetrics) -> None:
        """Bring the engines of a policy to its weights after so many steps; all ranks of its sync call it.

        For validation, after a step or before the first.
        """
        self._bring(name, self[name].version_after(steps), metrics, of_step=False)

    def sync(self, name: str, step: int, metrics: StepMetrics, changed: int = 0) -> None:
        """Bring the engines of a policy to the weights that generate rows of `step`, see `versions_of`."""
        self._bring(name, self._version(name, step, changed), metrics)

    def _version(self, name: str, step: int, changed: int) -> int:
        policy = self[name]
        begun = step >= policy.start_step
        return policy.version_after(max(0, step - self._run.plan.max_staleness)) + (changed if begun else 0)

    def _bring(self, name: str, version: int, metrics: StepMetrics, of_step: bool = True) -> None:
        if not self[name].bring(version, metrics, self._callbacks, of_step):
            return
        owner = self._run.engines.owner
        for other in self:
            if other != name and owner(other) == owner(name):
                self[other].forget()  # its turn in the engine is over

    def scored(self, role: str) -> None:
        """A node has scored rows with a role; once is enough to compare."""
        if role in self and (gap := self[role].gap) is not None:
            gap.close_if_compared()

    def before_update(self, role: str) -> None:
        """The weights of a role are about to change."""
        if role in self and (gap := self[role].gap) is not None:
            gap.close()

    @property
    def gaps(self) -> dict[str, dict[str, Any]]:
        """By policy, what the gap of the next step is compared with; JSON-able and the same on every rank."""
        return {policy.name: policy.gap.history for policy in self.values() if policy.gap is not None}

    def restore_gaps(self, gaps: Mapping[str, Mapping[str, Any]]) -> None:
        """Take back what `gaps` gave."""
        for policy in self.values():
            if policy.gap is not None and policy.name in gaps:
                policy.gap.restore(gaps[policy.name])

    def check(self, reduced: dict[str, float]) -> None:
        """Stop the run if a policy's engines did not generate with the trainer's weights.

        Args:
            reduced: The step's metrics, to which those of the comparison are added.

        Raises:
            UserError: One did not.
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
    probe = Probe(run, task, gap) if _needs_probe(run, name) else None
    return Policy(name, engine, sync, changes, start, gap, probe)


def _needs_probe(run: Run, name: str) -> bool:
    """Whether some rows are generated only to be compared with the trainer's own model.

    Where steps overlap, or responses are continued from older ones, few rows or none are of the trainer's version; nor
    are they compared where its model does not score them before it changes.
    """
    return bool(run.plan.max_staleness) or run.plan.cuts_off or not scores_its_rows(name, run.graph)


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
