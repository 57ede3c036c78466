"""The policies that generate: of each its engine, how weights get there, their version, and whether they are right."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.callbacks.callback import Callback
from rlflow.callbacks.hooks import Callbacks
from rlflow.controller.gap import LogprobGap
from rlflow.controller.probe import Probe
from rlflow.dag.tasks import SyncWeights
from rlflow.databuffer.message import from_message, to_message
from rlflow.databuffer.transport import Transport
from rlflow.metrics import StepMetrics
from rlflow.rollout.engine import NO_VERSION, RolloutEngine, SyncReport
from rlflow.strategies.strategy import TrainingStrategy


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
    """All policies of a run, by name, in the same order on every rank.

    Args:
        policies: Of this rank.
        shared: Of each policy that takes turns in the engine of another, that other.
        max_staleness: How many steps generation runs ahead of training.
        callbacks: Told of syncs.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        shared: Mapping[str, str],
        max_staleness: int = 0,
        callbacks: Callbacks | None = None,
    ) -> None:
        self._policies = {policy.name: policy for policy in policies}
        self._shared = shared
        self._max_staleness = max_staleness
        self._callbacks = callbacks

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
        return policy.version_after(max(0, step - self._max_staleness)) + (changed if begun else 0)

    def _bring(self, name: str, version: int, metrics: StepMetrics, of_step: bool = True) -> None:
        if not self[name].bring(version, metrics, self._callbacks, of_step):
            return
        for other in self:
            if other != name and self._owner(other) == self._owner(name):
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

    def _owner(self, name: str) -> str:
        return self._shared.get(name, name)


Bucket = list[tuple[str, Tensor]]


class WeightSync:
    """Brings weights from the ranks that train to those that generate, seen from one rank.

    Every rank of the role gathers its weights bucket by bucket. Where engines stand on ranks without the role, the
    first rank of the role sends each bucket on to them by broadcast. Every engine reads back all that it was given.

    Args:
        task: Whose weights go where.
        strategy: Holds the role, on its ranks.
        engine: Of this rank; None without.
        transport: To the other ranks; has formed the group of `sending_group`.
        bucket_bytes: Weights gathered, and sent, at once.
        files: Reads the weights of a frozen policy; None where steps change them.
        keeps: Whether the engine keeps the weights while it sleeps: those of files, in an engine of the policy's own.

    Attributes:
        version: Of the weights in the engines, known alike on all ranks of the task.
    """

    def __init__(
        self,
        task: SyncWeights,
        strategy: TrainingStrategy,
        engine: RolloutEngine | None,
        transport: Transport,
        bucket_bytes: int,
        files: Callable[[], Iterator[Bucket]] | None = None,
        keeps: bool = False,
    ) -> None:
        self.version = NO_VERSION
        self._unlogged: list[SyncReport | None] = []
        self._policy = task.policy
        self._files = files
        self._keeps = keeps
        self._asleep = False
        self._strategy = strategy
        self._engine = engine
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._group = sending_group(task)
        self._trains = transport.rank in task.source
        self._sender = task.source[0] if task.source else None
        self._sends = len(self._group) > 1 and transport.rank == self._sender

    def run(self, version: int) -> SyncReport | None:
        """Bring the engines to the weights that the trainer has now; what this rank's engine says, if it has one.

        Args:
            version: Of these weights.

        Raises:
            WeightSyncError: The engine does not hold what was sent.
        """
        buckets = self._files() if self._files is not None else self._gathered() if self._trains else self._received()
        report = None
        if self._engine is not None:
            self._engine.wake_up()
            self._asleep = False
            report = self._engine.update_weights(buckets, version)
        for _ in buckets:  # gathering is a collective of the role's ranks
            pass
        self.version, self._unlogged = version, [report]
        return report

    def take_reports(self) -> list[SyncReport | None]:
        """Reports of this rank's engine on weights sent since the last call; a None for each sync without an engine.

        Their number is the same on all ranks of the task.
        """
        reports, self._unlogged = self._unlogged, []
        return reports

    def sleep(self) -> None:
        """Let this rank's engine give back its memory, and with it the weights, unless it keeps them."""
        if self._engine is not None:
            self._engine.sleep(keep_weights=self._keeps)
            self._asleep = True
        if not self._keeps:
            self.forget()

    def wake_up(self) -> None:
        """Let this rank's engine, which holds the weights, take its memory back."""
        if self._engine is not None and self._asleep:
            self._engine.wake_up()
            self._asleep = False

    def forget(self) -> None:
        """The engines have let go of their weights."""
        self.version = NO_VERSION

    def _gathered(self) -> Iterator[Bucket]:
        for bucket in self._strategy.weights(self._policy, self._bucket_bytes):
            if self._sends:
                self._send(bucket)
            yield bucket
        if self._sends:
            self._send([])

    def _send(self, bucket: Bucket) -> None:
        device = self._transport.device
        header = json.dumps([[name, str(of.dtype).removeprefix("torch."), list(of.shape)] for name, of in bucket])
        payload = [of.detach().to(device).contiguous().flatten().view(torch.uint8) for _, of in bucket]
        self._transport.broadcast_bytes(to_message(header.encode()), self._transport.rank, self._group)
        if bucket:
            self._transport.broadcast_bytes(torch.cat(payload), self._transport.rank, self._group)

    def _received(self) -> Iterator[Bucket]:
        """The buckets that the sender sends, up to an empty one."""
        while header := json.loads(from_message(self._hear())):
            payload = self._hear()
            bucket: Bucket = []
            for name, kind, shape in header:
                dtype: torch.dtype = getattr(torch, kind)
                size = dtype.itemsize * torch.Size(shape).numel()
                bucket.append((name, payload[:size].clone().view(dtype).view(shape)))
                payload = payload[size:]
            yield bucket

    def _hear(self) -> Tensor:
        assert self._sender is not None
        return self._transport.broadcast_bytes(None, self._sender, self._group)


def sending_group(task: SyncWeights) -> tuple[int, ...]:
    """The first rank of the role and the engines' ranks without the role: who meets in the broadcasts."""
    if not task.source:  # every engine reads the files
        return (task.target[0],)
    return tuple(sorted({task.source[0], *set(task.target) - set(task.source)}))
