"""The process that an engine has for itself: it does what its rank asks, one call after another, and ends with it."""

from __future__ import annotations

import datetime
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.errors import UserError
from rlflow.models.fingerprint import fingerprint
from rlflow.rollout.engine import RolloutEngine
from rlflow.rollout.manifest import Piece, WeightSyncError
from rlflow.rollout.shared import mapped

POLL_S = 0.2
TOLD_AS_THEY_ARE: tuple[type[Exception], ...] = (UserError, WeightSyncError)


@dataclass(frozen=True)
class EngineGroup:
    """The processes that hold one engine together.

    Attributes:
        index: Of this one.
        size: Of the group.
        address: `host:port` of its store; unused where `size` is 1.
        timeout_s: For each of its collectives.
    """

    index: int
    size: int
    address: str
    timeout_s: float


@dataclass(frozen=True)
class SentWeight:
    """A tensor on its way; a file descriptor of shared memory follows, unless it lies in a GPU's.

    Attributes:
        name: The trainer's.
        shape: Of the tensor.
        dtype: Of the tensor.
        pieces: Slices that alone have the tensor's values; none where all of it has.
        fingerprints: Of the pieces, or of the whole, before they were copied.
        on_gpu: What opens the memory of a GPU that both processes use: a function and its arguments.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    fingerprints: tuple[int, ...]
    on_gpu: tuple[Callable[..., Tensor], tuple[Any, ...]] | None = None


class End:
    """Sent after the last weight."""


class Withdrawn:
    """Sent where the next weight should be: the trainer's side failed."""


class Taken:
    """The weight sent last is loaded, or kept by the engine; the next may come."""


@dataclass(frozen=True)
class Done:
    """The answer to a call.

    Attributes:
        result: Of the engine's method.
        policy_version: That the engine now holds.
    """

    result: Any
    policy_version: int


@dataclass(frozen=True)
class Failed:
    """A call raised.

    Attributes:
        kind: The error's class, if rank and engine know it alike; None for any other.
        text: Of the error.
        trace: Where it was raised.
        policy_version: That the engine now holds.
    """

    kind: type[Exception] | None
    text: str
    trace: str
    policy_version: int


def main(descriptor: int, parent: int) -> None:
    """Serve the rank at the other end of the socket until it is gone.

    Args:
        descriptor: Of the socket.
        parent: Id of the rank's process.
    """
    for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal; they are the rank's, with which this process ends
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_follow, args=(parent,), daemon=True, name="parent-watch").start()
    connection = Connection(descriptor)
    try:
        engine, group = _first(connection)
        _join(group)
        _Service(connection, engine).run()
    except (EOFError, ConnectionError):
        pass  # the rank is gone, or has closed the engine
    os._exit(0)  # taking torch and vLLM down in good order costs seconds, and prints


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)


def _first(connection: Connection) -> tuple[RolloutEngine, EngineGroup]:
    received: tuple[RolloutEngine, EngineGroup] = pickle.loads(connection.recv_bytes())
    return received


def _join(group: EngineGroup) -> None:
    """Form the engine's own group, of one process too: in a group vLLM takes the GPU that `LOCAL_RANK` names."""
    limit = datetime.timedelta(seconds=group.timeout_s)
    host, _, port = group.address.rpartition(":")
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    if group.size > 1:
        store = dist.TCPStore(host, int(port), is_master=False, timeout=limit)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=group.index, world_size=group.size, timeout=limit)


class _Service:
    """Calls the engine as the rank says."""

    def __init__(self, connection: Connection, engine: RolloutEngine) -> None:
        self._connection = connection
        self._engine = engine

    def run(self) -> None:
        while True:
            method, arguments, keywords = self._connection.recv()
            if method == "update_weights":
                arguments = (self._buckets(), *arguments)
            try:
                result = getattr(self._engine, method)(*arguments, **keywords)
            except Exception as error:
                kind = type(error) if isinstance(error, TOLD_AS_THEY_ARE) else None
                text = str(error) if kind else f"{type(error).__name__}: {error}"
                answer: Done | Failed = Failed(kind, text, traceback.format_exc(), self._engine.policy_version)
            else:
                answer = Done(result, self._engine.policy_version)
            self._connection.send(answer)

    def _buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Buckets of one weight each, as they come; each is acknowledged when the next is asked for."""
        while not isinstance(weight := self._connection.recv(), End):
            if isinstance(weight, Withdrawn):
                raise WeightSyncError("the trainer withdrew its weights")
            tensor = self._opened(weight)
            if fingerprints(tensor, weight.pieces) != weight.fingerprints:
                raise WeightSyncError(f"`{weight.name}` reached the engine's process with other values than were sent")
            yield [(weight.name, tensor)]
            del tensor
            self._connection.send(Taken())

    def _opened(self, weight: SentWeight) -> Tensor:
        if weight.on_gpu is not None:
            rebuild, arguments = weight.on_gpu
            return rebuild(*arguments)
        descriptor = recv_handle(self._connection)
        tensor = mapped(descriptor, weight.shape, weight.dtype)
        os.close(descriptor)
        return tensor


def fingerprints(tensor: Tensor, pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Of each piece, or of the whole where there are none."""
    parts = [piece.sent(tensor) for piece in pieces] or [tensor]
    return tuple(torch.stack([fingerprint(part) for part in parts]).tolist())
