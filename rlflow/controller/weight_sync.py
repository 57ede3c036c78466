"""Weight sync: sends a policy's weights to its engines, which may be on other ranks than training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from rlflow.controller.run import Run
from rlflow.dag.tasks import SyncWeights
from rlflow.databuffer.transport import Transport
from rlflow.models.causal_lm import stored_weights
from rlflow.module import handles
from rlflow.rollout.engine import NO_VERSION, RolloutEngine, SyncReport
from rlflow.strategies.strategy import TrainingStrategy

Bucket = list[tuple[str, Tensor]]


@dataclass(eq=False)
class WeightSync:
    """One rank's part in sending weights from the ranks that train to those that generate.

    Every rank of the role gathers its weights bucket by bucket. If engines are on ranks without the role, the first
    rank of the role broadcasts each bucket to them. Every engine reads back all weights that it was sent.

    Attributes:
        task: Task with the policy, the ranks that send, and the ranks that receive.
        strategy: Strategy that holds the role, on the role's ranks.
        engine: Engine of this rank; None if it has none.
        transport: Transport to the other ranks, on which the process group of `sending_group` was formed.
        bucket_bytes: Bytes of weights that are gathered, and sent, together.
        files: Reads the weights of a frozen policy from files; None if steps change the weights.
        keeps: Whether the engine keeps the weights while it sleeps. It does if they come from files and no other policy
            uses the engine.
        version: Version of the weights in the engines, the same on all ranks of the task; `NO_VERSION` if the engines
            have other weights, or none.
        report: Report of this rank's engine on the last sync; None without an engine.
        is_logged: Whether a step has logged the last sync, the same on all ranks of the task.
    """

    task: SyncWeights
    strategy: TrainingStrategy
    engine: RolloutEngine | None
    transport: Transport
    bucket_bytes: int
    files: Callable[[], Iterator[Bucket]] | None = None
    keeps: bool = False
    version: int = field(default=NO_VERSION, init=False)
    report: SyncReport | None = field(default=None, init=False)
    is_logged: bool = field(default=True, init=False)

    def run(self, version: int) -> None:
        """Send the trainer's present weights to the engines; called by all ranks of the task.

        Args:
            version: Version of these weights.

        Raises:
            WeightSyncError: The engine does not have the weights that were sent.
        """
        if self.files is not None:
            buckets = self.files()
        else:
            buckets = self._gathered() if self.transport.rank in self.task.source else self._received()
        if self.engine is not None:
            self.engine.wake_up()
            self.report = self.engine.update_weights(buckets, version)
        for _ in buckets:  # gathering is a collective of the role's ranks
            pass
        self.version, self.is_logged = version, False

    def sleep(self) -> None:
        """Let this rank's engine free its memory, weights included unless `keeps` is set."""
        if self.engine is not None:
            self.engine.sleep(keep_weights=self.keeps)
        if not self.keeps:
            self.version = NO_VERSION

    def wake_up(self) -> None:
        """Let this rank's engine, which has the weights, begin a step or a validation."""
        if self.engine is not None:
            self.engine.wake_up()

    def _gathered(self) -> Iterator[Bucket]:
        group, rank = sending_group(self.task), self.transport.rank
        sends = len(group) > 1 and rank == self.task.source[0]
        for bucket in self.strategy.weights(self.task.policy, self.bucket_bytes):
            if sends:
                self._send(bucket, group)
            yield bucket
        if sends:
            self._send([], group)

    def _send(self, bucket: Bucket, group: tuple[int, ...]) -> None:
        device, rank = self.transport.device, self.transport.rank
        header = [[name, str(of.dtype).removeprefix("torch."), list(of.shape)] for name, of in bucket]
        payload = [of.detach().to(device).contiguous().flatten().view(torch.uint8) for _, of in bucket]
        self.transport.broadcast_json(header, rank, group)
        if bucket:
            self.transport.broadcast_bytes(torch.cat(payload), rank, group)

    def _received(self) -> Iterator[Bucket]:
        """Receive the sender's buckets, up to an empty one."""
        group, sender = sending_group(self.task), self.task.source[0]
        while header := self.transport.broadcast_json(None, sender, group):
            payload = self.transport.broadcast_bytes(None, sender, group)
            bucket: Bucket = []
            for name, kind, shape in header:
                dtype: torch.dtype = getattr(torch, kind)
                size = dtype.itemsize * torch.Size(shape).numel()
                bucket.append((name, payload[:size].clone().view(dtype).view(shape)))
                payload = payload[size:]
            yield bucket


def sending_group(task: SyncWeights) -> tuple[int, ...]:
    """The ranks that take part in the broadcasts: the first rank of the role, and engines' ranks without the role."""
    if not task.source:  # every engine reads the files
        return (task.target[0],)
    return tuple(sorted({task.source[0], *set(task.target) - set(task.source)}))


def weight_sync(run: Run, task: SyncWeights) -> WeightSync | None:
    """This rank's part in sending a policy's weights to its engines; None if it has none.

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
