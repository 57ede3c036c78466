"""Weight sync: a policy's weights on their way into its engines, across ranks where these are apart from training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        header = [[name, str(of.dtype).removeprefix("torch."), list(of.shape)] for name, of in bucket]
        payload = [of.detach().to(device).contiguous().flatten().view(torch.uint8) for _, of in bucket]
        self._transport.broadcast_json(header, self._transport.rank, self._group)
        if bucket:
            self._transport.broadcast_bytes(torch.cat(payload), self._transport.rank, self._group)

    def _received(self) -> Iterator[Bucket]:
        """The buckets that the sender sends, up to an empty one."""
        assert self._sender is not None
        while header := self._transport.broadcast_json(None, self._sender, self._group):
            payload = self._transport.broadcast_bytes(None, self._sender, self._group)
            bucket: Bucket = []
            for name, kind, shape in header:
                dtype: torch.dtype = getattr(torch, kind)
                size = dtype.itemsize * torch.Size(shape).numel()
                bucket.append((name, payload[:size].clone().view(dtype).view(shape)))
                payload = payload[size:]
            yield bucket


def sending_group(task: SyncWeights) -> tuple[int, ...]:
    """The first rank of the role and the engines' ranks without the role: who meets in the broadcasts."""
    if not task.source:  # every engine reads the files
        return (task.target[0],)
    return tuple(sorted({task.source[0], *set(task.target) - set(task.source)}))


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
