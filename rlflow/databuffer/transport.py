"""This process's place among the ranks, and the few collectives on which the data plane is built."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.process.status import waiting
from rlflow.values.host_copy import on_device

P = ParamSpec("P")
T = TypeVar("T")
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_world: dist.ProcessGroup | None = None  # the group of all ranks when the groups in `_formed` were formed
_formed: dict[tuple[tuple[int, ...], timedelta | None], dist.ProcessGroup | None] = {}


class Watch(Protocol):
    """Receives the waits of a rank; times are seconds of `time.perf_counter`."""

    def wait(self, name: str, start: float, end: float) -> None:
        """This rank waited for `name`."""

    def flight(self, name: str, start: float, end: float) -> None:
        """`name`, such as a transfer, was in progress while this rank did other work."""

    def turn(self, of: str, conversation: int, start: float, end: float, **arguments: Any) -> None:
        """The conversation of this number waited for a turn of its policy, or for its environment."""


def _waits(collective: Callable[P, T]) -> Callable[P, T]:
    """Reports to the transport's watch how long a collective took, which is mostly a wait for other ranks."""

    @functools.wraps(collective)
    def watched(*args: P.args, **kwargs: P.kwargs) -> T:
        transport = args[0]
        assert isinstance(transport, Transport)
        watch = transport.watch
        with waiting():
            if watch is None:
                return collective(*args, **kwargs)
            with transport.clock.waiting(functools.partial(watch.wait, collective.__name__)):
                return collective(*args, **kwargs)

    return watched


class Transport:
    """Collectives over `torch.distributed`; with one rank and no process group nothing is sent.

    Every rank of a collective makes the same calls in the same order.

    Args:
        device: Device on which messages are held while they travel: `cpu` for gloo, the rank's GPU for NCCL.
        timeout: Time after which a collective that a rank does not join fails; None for torch's own.

    Attributes:
        rank: Rank of this process, from 0.
        world_size: Number of ranks.
        timeout: Timeout as given.
        watch: Receives the times of waits, if it is set.
        clock: Measures the times of waits.
    """

    def __init__(self, device: torch.device | str = "cpu", timeout: timedelta | None = None) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.device = torch.device(device)
        self.rank = dist.get_rank() if joined else 0
        self.world_size = dist.get_world_size() if joined else 1
        self.timeout = timeout
        self.watch: Watch | None = None
        on_gpu = self.device.type == "cuda"
        self.clock = Clock(functools.partial(torch.Event, self.device, enable_timing=True) if on_gpu else None)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(self.world_size)): None}

    def form_groups(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Form the process groups of these ranks, ascending; a collective of all ranks, members or not."""
        for ranks in sorted({ranks for ranks in groups if len(ranks) > 1} - self._groups.keys()):
            self._groups[ranks] = process_group(ranks, self.timeout)

    @_waits
    def all_gather(self, tensor: Tensor, ranks: tuple[int, ...] | None = None) -> list[Tensor]:
        """The tensors of `ranks`, in their order; of the same shape and dtype everywhere.

        Args:
            tensor: Tensor of this rank.
            ranks: Ranks that take part, ascending: one of the groups formed; all where None.
        """
        ranks = tuple(range(self.world_size)) if ranks is None else ranks
        if len(ranks) == 1:
            return [tensor]
        sent = on_device(tensor.contiguous(), self.device)
        received = sent.new_empty((len(ranks), *sent.shape))
        dist.all_gather(list(received.unbind()), sent, group=self._groups[ranks])
        return list(received.to(tensor.device).unbind())

    def all_gather_ragged(self, tensor: Tensor, ranks: tuple[int, ...] | None = None) -> list[Tensor]:
        """The 1-dim tensors of `ranks`, in their order; lengths may differ, the dtype may not."""
        counts = [int(count) for count in self.all_gather(torch.tensor([tensor.numel()]), ranks)]
        padded = tensor.new_zeros(max(counts))
        padded[: tensor.numel()] = tensor
        return [each[:count] for each, count in zip(self.all_gather(padded, ranks), counts, strict=True)]

    @_waits
    def gather_bytes(self, message: bytes, ranks: tuple[int, ...] | None = None) -> list[bytes]:
        """The messages of `ranks`, in their order, of any length; they stay on the host, and travel by gloo."""
        ranks = tuple(range(self.world_size)) if ranks is None else ranks
        if len(ranks) == 1:
            return [message]
        group = self._groups[ranks]
        sizes = list(torch.zeros(len(ranks), 1, dtype=torch.int64).unbind())
        dist.all_gather(sizes, torch.tensor([len(message)]), group=group)
        longest = max(int(size) for size in sizes)
        if not longest:
            return [b""] * len(ranks)
        received = list(torch.zeros(len(ranks), longest, dtype=torch.uint8).unbind())
        dist.all_gather(received, to_message(message.ljust(longest)), group=group)
        return [from_message(each)[: int(size)] for each, size in zip(received, sizes, strict=True)]

    def gather_json(self, value: Any, ranks: tuple[int, ...] | None = None) -> list[Any]:
        """The JSON-able values of `ranks`, in their order; see `gather_bytes`."""
        return [json.loads(message) for message in self.gather_bytes(json.dumps(value).encode(), ranks)]

    @_waits
    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """The sum or the largest over all ranks, element by element, in a new tensor.

        A tensor on the CPU stays there and travels by gloo, so the host need not wait for a GPU.
        """
        reduced = tensor.clone(memory_format=torch.contiguous_format)
        if self.world_size > 1:
            dist.all_reduce(reduced, _OPERATIONS[op])
        return reduced

    @_waits
    def broadcast_bytes(self, message: Tensor | None, source: int, ranks: tuple[int, ...]) -> Tensor:
        """The uint8 `message` of rank `source`, of any length, on `device`.

        Args:
            message: Message of `source`; None on the others.
            source: Rank that sends.
            ranks: Ranks that take part, ascending: one of the groups formed.
        """
        if len(ranks) == 1:
            assert message is not None
            return message
        size = torch.tensor([0 if message is None else message.numel()], device=self.device)
        dist.broadcast(size, source, group=self._groups[ranks])
        if message is None:
            message = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        message = on_device(message, self.device)
        if message.numel():
            dist.broadcast(message, source, group=self._groups[ranks])
        return message

    def broadcast_json(self, value: Any, source: int, ranks: tuple[int, ...]) -> Any:
        """The JSON-able value of rank `source`, on all of `ranks`; the values of other ranks are not read."""
        message = to_message(json.dumps(value).encode()) if self.rank == source else None
        return json.loads(from_message(self.broadcast_bytes(message, source, ranks)))

    def all_to_all(
        self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], ranks: tuple[int, ...]
    ) -> tuple[Tensor, dist.Work]:
        """Start to send a part of `send` to each of `ranks`; only they call this, with the same `ranks`.

        Args:
            send: `[sum(send_sizes)]`, on `device`; not to be written to until the work is done.
            send_sizes: Elements for each of `ranks`, in their order.
            receive_sizes: Elements from each of them.
            ranks: Ranks that take part, ascending: all ranks, or one of the groups formed.

        Returns:
            The received elements, `[sum(receive_sizes)]`, to be read after the work's `wait`; and the work.
        """
        received = send.new_empty(sum(receive_sizes))
        work = dist.all_to_all_single(
            received, send, list(receive_sizes), list(send_sizes), group=self._groups[ranks], async_op=True
        )
        assert work is not None
        return received, work


def to_message(said: bytes) -> Tensor:
    """Bytes as collectives carry them: `[len(said)]` uint8, on the CPU."""
    return torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else torch.empty(0, dtype=torch.uint8)


def from_message(message: Tensor) -> bytes:
    """The bytes of a message that `to_message` made, from any device."""
    said: bytes = message.cpu().numpy().tobytes()
    return said


class Clock:
    """Measures how long a rank waited: in the host's time, or in the time of its device's stream.

    On the CPU the host is idle while it waits for a collective. On a GPU `Work.wait` asks the stream to wait and
    returns immediately. So there the time is measured between two events on the stream. It is read when the host waits
    for the device anyway. On the host's clock such a wait begins when the stream was asked to wait. It lasts as long as
    the stream stood still after the work before it.

    Args:
        event: Makes an event of the current stream that records its time, as `torch.Event` does; None to measure the
            host's time.
    """

    def __init__(self, event: Callable[[], Any] | None) -> None:
        self._event = event
        self._unread: list[tuple[float, Any, Any, Callable[[float, float], None]]] = []

    @contextmanager
    def waiting(self, done: Callable[[float, float], None]) -> Iterator[None]:
        """Measure the block as a wait; `done` gets its begin and end in seconds of `time.perf_counter`, by `settle`."""
        begin = time.perf_counter()
        if self._event is None:
            yield
            done(begin, time.perf_counter())
            return
        before, after = self._event(), self._event()
        before.record()
        yield
        after.record()
        self._unread.append((begin, before, after, done))

    def settle(self) -> None:
        """Report all waits so far."""
        if self._unread:
            self._unread[-1][2].synchronize()
        for begin, before, after, done in self._unread:
            done(begin, begin + before.elapsed_time(after) / 1000)
        self._unread.clear()


def process_group(ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup | None:
    """The group of `ranks`, formed once and used by one run after another; None where this rank is not one of them.

    A group costs threads and sockets under gloo, and buffers on the GPU under NCCL, where two groups of the same ranks
    could also wait for one another.

    All ranks of the job call this in the same order, for groups of one rank too. The reason is how torch names a group:
    by the number of earlier calls of `new_group` in the process. Engines such as vLLM form groups of all ranks, and
    these need the same name on all ranks. Groups that their members form alone (`use_local_synchronization`) are no
    way out: they are named by the number of groups that each member has, and hang where these numbers differ.

    The price is a call of every rank for each group, and an object on its members. Members connect when they first use
    the group, since nothing is split from the group of all ranks, which is bound to no device. On the CPU alone gloo
    connects immediately, see `connect_when_used`.

    Args:
        ranks: Ranks of the group, ascending.
        timeout: Time after which a collective of the group fails; None for torch's own.
    """
    global _world
    if _world is not dist.group.WORLD:
        _world = dist.group.WORLD
        _formed.clear()
    if len(ranks) == dist.get_world_size():
        return _world
    if (ranks, timeout) not in _formed:
        group = dist.new_group(list(ranks), timeout=timeout)
        _formed[ranks, timeout] = group if dist.get_rank() in ranks else None
    return _formed[ranks, timeout]


def connect_when_used() -> None:
    """Let gloo's groups connect two ranks when these first exchange something; called before any group is formed.

    Otherwise every rank connects to every other immediately. This holds with NCCL too, where gloo carries small
    messages. Each of 1,024 ranks would open 1,023 sockets, about as many files as a process may have.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def of_a_collective(error: BaseException | None) -> bool:
    """Whether the error means that another rank is gone, or did not join a collective in time."""
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
