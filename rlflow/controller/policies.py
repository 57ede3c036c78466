"""The policies that generate: engine, weight sync, version of the weights, and the check that the engine has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from rlflow.callbacks.callback import Callback
from rlflow.callbacks.hooks import Callbacks
from rlflow.controller.gap import STEPS, LogprobGap, probe
from rlflow.controller.run import Run
from rlflow.controller.weight_sync import WeightSync, weight_sync
from rlflow.dag.graph import Graph
from rlflow.dag.tasks import SyncWeights
from rlflow.metrics import StepMetrics
from rlflow.models.causal_lm import EMA, CausalLM
from rlflow.module import handles
from rlflow.rollout.engine import NO_VERSION, RolloutEngine
from rlflow.values.rollout import Rollout


@dataclass(frozen=True)
class Policy:
    """A policy that generates, on one rank.

    The version of its weights is the number of times that train nodes have changed them. With two train nodes per step
    and `start_step` 10 it is 0 up to step 10 (counted from 0), then 2, 4, 6, ... Skipped updates count too.

    Attributes:
        name: Name of the policy, which is the role of its model.
        engine: Rollout engine on this rank; None if this rank does not generate with the policy.
        sync: Sends the weights to the engines; None on ranks that take no part in it.
        changes_per_step: Number of nodes per step that change the weights; 0 for a frozen policy.
        start_step: First step that changes the weights, from 0.
        gap: Compares logprobs of engine and trainer, and ends the run if weights are wrong; None for a frozen policy.
        probe: Function that generates rows for this comparison after each sync, given the version and the step's
            metrics; None if the rows of steps are compared.
    """

    name: str
    engine: RolloutEngine | None
    sync: WeightSync | None
    changes_per_step: int = 0
    start_step: int = 0
    gap: LogprobGap | None = None
    probe: Callable[[int, StepMetrics], None] | None = None

    def version_after(self, steps: int) -> int:
        """The version of the weights after `steps` steps: 0 up to `start_step`, then `changes_per_step` more a step."""
        return self.changes_per_step * max(0, steps - self.start_step)

    def compare(self, version: int, metrics: StepMetrics, end: str) -> None:
        """Log the last sync if no step has done so, and begin to compare logprobs; called by all ranks of the sync.

        `end` is the end of the metric's name.
        """
        if self.gap is not None and self.probe is None:
            self.gap.open(version, metrics)
        if self.sync is None or self.sync.is_logged:
            return
        if self.probe is not None:
            self.probe(version, metrics)
        if self.sync.report is not None:
            metrics.number(f"sync/verified_tensors{end}", float(self.sync.report.tensors))
        self.sync.is_logged = True

    def sleep(self) -> None:
        """Let the engines free their memory, and weights that training changes; called by all ranks of the sync."""
        if self.sync is not None:
            self.sync.sleep()

    def forget(self) -> None:
        """Note that the engines hold other weights, or none, so that the next `bring` sends them."""
        if self.sync is not None:
            self.sync.version = NO_VERSION


class Policies(dict[str, Policy]):
    """All policies of a run by name, in the same order on every rank.

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
        """The version of each policy that generates the rows of `step`: the one after the last step trained by then.

        For one train node and `max_staleness` 2 these are 0 0 0 1 2 3 in the steps 0 to 5.

        Args:
            step: Number of the step, from 0.
            changed: Number of times that this step changes its weights before it generates, by policy.
        """
        return {name: self._version(name, step, changed.get(name, 0)) for name in self}

    def sync(self, name: str, step: int, metrics: StepMetrics, changed: int = 0) -> None:
        """Send the weights that generate the rows of `step`, see `versions_of`; called by all ranks of the sync."""
        version = self._version(name, step, changed)
        self._bring(name, version)
        self[name].compare(version, metrics, f"/{name}" if len(self) > 1 else "")

    def bring(self, name: str, steps: int) -> None:
        """Send a policy's weights after `steps` steps to its engines, for validation; called by all ranks.

        The next step logs and compares them. So a run that resumes in between logs the same.
        """
        if self[name].sync is not None:
            self._bring(name, self[name].version_after(steps))

    def _version(self, name: str, step: int, changed: int) -> int:
        policy = self[name]
        begun = step >= policy.start_step
        return policy.version_after(max(0, step - self._run.plan.max_staleness)) + (changed if begun else 0)

    def _bring(self, name: str, version: int) -> None:
        """Send the trainer's weights to the engines, or wake engines that have `version` already.

        Called by all ranks of the sync. Each engine reads back the weights that it was sent, and compares them tensor
        by tensor.
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
        """Note that a node has scored rows with a role; if logprobs were compared, the step compares no more."""
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
        """Restore what `state_dict` returned; policies may have been added or removed since."""
        for policy in self.values():
            if policy.gap is not None and policy.name in state:
                policy.gap.load_state_dict(state[policy.name])

    def check(self, reduced: dict[str, float]) -> None:
        """Stop the run if a policy's engines did not generate with the trainer's weights.

        Args:
            reduced: The step's metrics over all ranks; metrics of the comparison are added.

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
    trial = 0 if run.strategy.root_device.type == "cpu" else STEPS
    counts = run.layouts[name].is_leader(run.transport.rank)
    gap = LogprobGap(limit, dtype, name if several else "", made_by if several else None, kind, trial, counts)
    lora = handle.lora
    draws_dropout = lora is not None and lora.dropout > 0  # so scores in training are not the policy's own

    def watch(rows: Any, logprobs: Tensor) -> None:
        if not (handle.in_training and draws_dropout):
            gap.observe(rows, logprobs)

    handle.watch = watch
    changes = sum(name in graph.changed_by(node) for node in graph.order)
    start = handle.owner.start_step if isinstance(handle, EMA) else handle.start_step
    # With `max_staleness` or `partial_rollout`, few or no rows of a step come from the trainer's present weights.
    served = scores_its_rows(name, graph, draws_dropout) and not (run.plan.max_staleness or run.plan.cuts_off)
    if served:
        return Policy(name, engine, sync, changes, start, gap)
    first = run.train.first()
    prompt, pictures = first.prompt_ids.values.tolist(), first.pictures.values.tolist()
    return Policy(name, engine, sync, changes, start, gap, partial(probe, run, task, gap, prompt, pictures))


def scores_its_rows(policy: str, graph: Graph, draws_dropout: bool = False) -> bool:
    """Whether, for each version of its weights in a step, a policy's model scores rows that it alone generated.

    Args:
        policy: Name of the policy.
        graph: Graph of the module.
        draws_dropout: Whether the model's scores in training are with dropout, so that they are not its own.
    """
    generated: dict[int, set[str]] = {}  # by the number of times that the step has changed the weights before
    scored: dict[int, set[str]] = {}
    for node in graph.order:
        changed = graph.changed_before(node)[policy]
        if policy in node.generates:
            generated.setdefault(changed, set()).update({node.id} if node.generates == (policy,) else ())
        if node.role == policy and not (node.kind == "train" and draws_dropout):
            rollouts = (value for value in node.reads if graph.type_of(value) is Rollout)
            scored.setdefault(changed, set()).update(graph.space_of(value) for value in rollouts)
    return all(rows & scored.get(changed, set()) for changed, rows in generated.items())
