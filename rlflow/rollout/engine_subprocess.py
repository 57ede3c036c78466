"""A rollout engine in a separate process of the same machine: both ends of the connection.

Used where only some ranks have engines, or two engines cannot share a process. The messages on the socket are pickled:

    rank (`EngineSubprocess`)                    engine's process (`main`)
    the engine                             ->
    ("setup", (model_path, rank_info))         ->
                                           <-    (policy version -1, result None, error None)
    ("update_weights", (7,))               ->
                                           <-    None: the next weight may come
    SentWeight, then a file descriptor     ->
                                           <-    None, and so on
    None: that was the last one            ->
                                           <-    (7, SyncReport(...), None)
"""

from __future__ import annotations

import datetime
import math
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.reductions import reduce_tensor

from rlflow.errors import UserError, line_log
from rlflow.models.weights import fingerprint
from rlflow.process.local_socket import listening
from rlflow.process.preemption import SIGNALS
from rlflow.rollout.engine import (
    NO_VERSION,
    Completion,
    GenerationRequest,
    Piece,
    RankInfo,
    RolloutEngine,
    Sampling,
    SyncReport,
    WeightSyncError,
    in_dtype_held,
)
from rlflow.values.picture import Picture

log = line_log(__name__)
_stores: dict[str, Any] = {}  # where the processes of an engine meet, by address


class EngineSubprocess(RolloutEngine):
    """Runs `engine` in another process of the same machine. Each rank that shares the engine starts such a process.

    Weights are sent one by one through memory that both processes map. On the CPU this memory holds only the slices of
    a tensor that this rank's part of the engine needs. On a GPU it holds the whole tensor (CUDA IPC).

    A `UserError` or a `WeightSyncError` of the engine is raised here with its text. Any other error, the end of the
    process, and a timeout are raised as `EngineProcessError`. The process ends when this process ends, even if this
    process is killed.

    If an engine on the CPU is not shared with other ranks, its process is started again if it dies or hangs while it
    generates, once for each weight sync. It receives a copy of the last weights, verifies them, and generates again. A
    response depends only on weights, prompt and seed, so it is the same.

    Args:
        engine: The engine as constructed. It is set up only in the other process. Its class must be in a module that
            can be imported, since the other process does not run the script that was started.
        index: Index of this rank among the ranks that share the engine.
        size: Number of ranks that share the engine.
        address: The result of `free_address` on the first of these ranks; unused if there is only one.
        timeout_s: Time limit of each wait for the process, in seconds. After it, the process is killed.
    """

    def __init__(self, engine: RolloutEngine, *, index: int, size: int, address: str, timeout_s: float) -> None:
        assert size == engine.tensor_parallel_size, (size, engine.tensor_parallel_size)
        self.tensor_parallel_size = size
        self._engine = engine
        self._index = index
        self._address = address
        self._timeout_s = timeout_s
        self._process: EngineConnection | None = None
        self._sent: list[tuple[str, Tensor]] = []  # the last weights, where they are stored
        self._sent_version = NO_VERSION  # of them, once the engine has them all
        self._turns: dict[int, GenerationRequest] = {}  # in progress
        self._restarted = False  # since the last sync
        self._pieces: dict[str, list[Piece]] = {}

    def memory_settings(self, on_cpu: bool) -> tuple[str, ...]:
        return self._engine.memory_settings(on_cpu)

    def setup(self, model_path: str, rank_info: RankInfo) -> None:
        self._dtype, self._device = rank_info.dtype, rank_info.device
        self._model_path, self._rank_info = model_path, rank_info
        self._start()

    def _start(self) -> None:
        rank_info = self._rank_info
        self._process = EngineConnection(rank_info.rank, self._environment(rank_info.local_rank), self._timeout_s)
        self._process.send(self._engine, "start")
        of_engine = replace(rank_info, rank=self._index, world_size=self.tensor_parallel_size)
        try:
            self._call("setup", "set up its engine", self._model_path, of_engine)
            self._pieces = {}
            for piece in self._call("pieces", "say which weights it holds"):
                self._pieces.setdefault(piece.name, []).append(piece)
        except BaseException:
            self._process.end(0.0)
            raise

    def _environment(self, local_rank: int) -> dict[str, str]:
        """Environment variables of the engine's process; `RANK` and `WORLD_SIZE` count ranks that share the engine."""
        of_job = ("TORCHELASTIC_", "PET_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(of_job)}
        host, _, port = self._address.rpartition(":")
        return environment | {
            "RANK": str(self._index),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.tensor_parallel_size),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": str(torch.get_num_threads()),  # sums are in another order with other numbers of threads
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
            "PYTHONUNBUFFERED": "1",
        }

    def check_context(self, prompt: int, response: int) -> None:
        self._call("check_context", "check its context", prompt, response)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        version: int,
        pictures: Sequence[Sequence[Picture]] = (),
    ) -> list[Completion]:
        asked = [list(map(int, prompt)) for prompt in prompts]
        doing = f"generate {len(asked)} responses"
        seen = [pictures] if any(pictures) else []  # a file that several prompts share is pickled once
        completions: list[Completion]
        completions = self._call_or_restart("generate", doing, asked, asked, list(seeds), sampling, version, *seen)
        return completions

    def step(self, new: Mapping[int, GenerationRequest], sampling: Sampling, version: int) -> dict[int, Completion]:
        plain = {at: replace(turn, prompt=list(map(int, turn.prompt))) for at, turn in new.items()}
        self._turns |= plain
        ended: dict[int, Completion]
        ended = self._call_or_restart("step", "continue its turns", plain, self._turns, sampling, version)
        self._turns = {at: turn for at, turn in self._turns.items() if at not in ended}
        return ended

    def abort(self) -> None:
        self._turns.clear()
        self._call("abort", "give up its turns")

    def update_weights(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        start = time.perf_counter()
        self._restarted = False
        self._sent, self._sent_version = [], NO_VERSION
        if not self._running().runs:  # it died after it had generated last
            log.warning("%s is gone; it is started again", self._running().name)
            self._running().end(0.0)
            self._start()
        if self.tensor_parallel_size == 1 and self._device.type == "cpu":
            buckets = self._copied(buckets)
        report = self._load(buckets, version)
        self._sent_version = version
        return SyncReport(report.version, report.tensors, report.nbytes, time.perf_counter() - start)

    def _call_or_restart(self, method: str, doing: str, new: Any, again: Any, *arguments: Any) -> Any:
        """Call a method of the engine; if that ends the process, start it again with its weights and repeat the call.

        The first argument is `new`, and in the repeated call `again`: of `step` all turns in progress, which the new
        process lacks. `doing` is for messages, such as `generate 8 responses`.

        Raises:
            EngineProcessError: The engine raised it; or the process was restarted since the last sync, or its weights
                were not stored.
        """
        try:
            return self._call(method, doing, new, *arguments)
        except EngineProcessError as error:
            version = self._sent_version
            if self._running().runs or self._restarted or version == NO_VERSION or not self._sent:
                raise
            self._restarted = True
            reason = str(error).partition("\n")[0]
        log.warning("%s It is started again, with the weights of version %d.", reason, version)
        self._start()
        self._load([self._sent], version)
        return self._call(method, doing, again, *arguments)

    def _copied(self, buckets: Iterable[list[tuple[str, Tensor]]]) -> Iterator[list[tuple[str, Tensor]]]:
        """Store a copy of each weight that passes, for a process that is started again."""
        for bucket in buckets:
            self._sent += [(name, in_dtype_held(name, tensor, self._dtype).clone()) for name, tensor in bucket]
            yield bucket

    def sleep(self, keep_weights: bool = False) -> None:
        if not keep_weights:
            self._sent, self._sent_version = [], NO_VERSION
        self._call_unless_gone("sleep", "sleep", keep_weights)

    def wake_up(self) -> None:
        if self._device.type != "cpu":  # what this process has freed its allocator keeps from the other
            torch.cuda.empty_cache()
        self._call_unless_gone("wake_up", "wake up")

    def _call_unless_gone(self, method: str, doing: str, *arguments: Any) -> None:
        """Call a method of the engine; a process that is gone is started again by the next sync, or by `generate`."""
        if self._running().runs or self.tensor_parallel_size > 1:  # others of the engine are not gone
            self._call(method, doing, *arguments)

    def close(self) -> None:
        process, self._process = self._process, None
        self.policy_version = NO_VERSION
        if process is not None and process.runs:
            with suppress(EngineProcessError):  # it is to end, and is ended
                process.send(("close", ()), "close")
                process.receive("close")
        if process is not None:
            process.end(END_S)
        _stores.pop(self._address, None)

    def _load(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        """Send weights, which the engine reads back; the next one is copied while it loads the one before.

        Where `buckets` raises, the process is ended, and the next sync starts it again.
        """
        process, doing = self._running(), f"load the weights of version {version}"
        self.policy_version = NO_VERSION
        process.send(("update_weights", (version,)), doing)
        try:
            for weight, descriptor in self._shared(buckets):
                answer = process.receive(doing)
                if answer is not None:  # it failed, and wants no more
                    if descriptor is not None:
                        os.close(descriptor)
                    break
                process.send(weight, doing, descriptor)
            else:
                answer = process.receive(doing)
        except BaseException:  # training's side failed, or the process is gone
            process.end(0.0)
            raise
        report: SyncReport = self._result(answer, doing)
        return report

    def _shared(
        self, buckets: Iterable[list[tuple[str, Tensor]]]
    ) -> Iterator[tuple[SentWeight, int | None] | tuple[None, None]]:
        """Each weight in memory that both processes map, on the CPU with its descriptor; None after the last."""
        for name, tensor in chain.from_iterable(buckets):
            tensor = in_dtype_held(name, tensor, self._dtype)
            pieces = tuple(self._pieces.get(name, ()))
            weight = SentWeight(name, tuple(tensor.shape), tensor.dtype, pieces, fingerprints(tensor, pieces))
            if tensor.is_cuda:
                # A copy, for the engine may keep it for longer than the trainer does; its memory is freed when both
                # let go.
                yield replace(weight, on_gpu=reduce_tensor(tensor.clone())), None
            else:
                yield weight, share(tensor, [piece.cut for piece in pieces])
        yield None, None

    def _call(self, method: str, doing: str, *arguments: Any) -> Any:
        process = self._running()
        process.send((method, arguments), doing)
        return self._result(process.receive(doing), doing)

    def _result(self, answer: tuple[int, Any, Exception | None], doing: str) -> Any:
        self.policy_version, result, error = answer
        if isinstance(error, EngineProcessError):
            error.args = (f"{self._running().name} could not {doing}: {error}",)
        if error is not None:
            raise error
        return result

    def _running(self) -> EngineConnection:
        assert self._process is not None, "the engine was not set up, or was closed"
        return self._process


def free_address() -> str:
    """Start the `TCPStore` at which the processes of an engine meet, and return its address, such as `10.0.0.4:41237`.

    Called on the first of the ranks that share the engine; `EngineSubprocess.close` ends the store. The host is the
    address of this machine from which the job's `MASTER_ADDR` is reached.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        host = probe.getsockname()[0]
    served = listening(host, 0)
    assert served is not None, host  # an address of this machine
    port = served.getsockname()[1]
    address = f"{host}:{port}"
    _stores[address] = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=served.detach())
    return address


END_S = 30.0  # how long an engine may take to close
DRAIN_S = 1.0  # how long to wait for the last of its errors
TAIL = 4096  # bytes of them that an error repeats


class EngineProcessError(RuntimeError):
    """The engine's process died, hung and was killed, or raised another error than `UserError` and `WeightSyncError`.

    Only in the last case does it still run.
    """


class EngineConnection:
    """Starts the engine's process, and exchanges messages with it.

    It runs `python -c`, so that the user's script is not run again. Its output goes where this process's output goes
    when it starts. The last 4 kB of its standard error are stored, and appear in the error if it dies.

    Args:
        rank: Rank that has the engine, for messages.
        environment: Environment variables of the process.
        timeout_s: Seconds that any wait for the process may take.
    """

    def __init__(self, rank: int, environment: Mapping[str, str], timeout_s: float) -> None:
        self.name = f"rank {rank}: the process of its engine"
        self._timeout_s = timeout_s
        here, there = socket.socketpair()
        limit = struct.pack("ll", *divmod(round(timeout_s * 1e6), 10**6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # not to hang in the middle of a message either
            here.setsockopt(socket.SOL_SOCKET, option, limit)
        self._connection = Connection(here.detach())
        call = f"from {__name__} import main; main({there.fileno()}, {os.getpid()}, {timeout_s})"
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-c", call],
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[there.fileno()],
        )
        there.close()
        self._last_words = b""
        self._listener = threading.Thread(target=self._listen, args=(os.dup(2),), daemon=True, name="engine-errors")
        self._listener.start()

    @property
    def runs(self) -> bool:
        return self._popen.poll() is None

    def send(self, message: Any, doing: str, descriptor: int | None = None) -> None:
        """Pickle and send a message, and after it a file descriptor, which is then closed in this process.

        Raises:
            EngineProcessError: The process died, or did not take the message in time.
        """
        try:
            self._connection.send_bytes(pickle.dumps(message))
            if descriptor is not None:
                send_handle(self._connection, descriptor, self._popen.pid)
        except BlockingIOError:
            raise self._late(doing) from None
        except OSError:
            raise self._death(doing) from None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def receive(self, doing: str) -> Any:
        deadline = time.monotonic() + self._timeout_s
        try:
            while not self._connection.poll(min(POLL_S, max(0.0, deadline - time.monotonic()))):
                if not self.runs and not self._connection.poll():  # another process may hold the socket open
                    raise self._death(doing)
                if time.monotonic() > deadline:
                    raise self._late(doing)
            return self._connection.recv()
        except BlockingIOError:
            raise self._late(doing) from None
        except (EOFError, ConnectionError):
            raise self._death(doing) from None

    def end(self, grace_s: float) -> None:
        """Close the connection, at which the process ends; kill it if it does not."""
        self._connection.close()
        try:
            self._popen.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._listener.join(DRAIN_S)

    def _late(self, doing: str) -> EngineProcessError:
        self.end(0.0)
        return EngineProcessError(
            f"{self.name} should {doing} and did not within {self._timeout_s:g} s; ended it.{self._repeated()}"
        )

    def _death(self, doing: str) -> EngineProcessError:
        self.end(END_S)
        code = self._popen.returncode
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return EngineProcessError(f"{self.name} {how} when it should {doing}.{self._repeated()}")

    def _repeated(self) -> str:
        words = self._last_words.decode(errors="replace").strip()
        return f" The end of its errors:\n{words}" if words else " It left no error."

    def _listen(self, errors: int) -> None:
        """Copy the output of the process to its errors, and store the end of it."""
        assert self._popen.stderr is not None
        with self._popen.stderr as stream, os.fdopen(errors, "wb", buffering=0) as out:
            while chunk := os.read(stream.fileno(), TAIL):
                self._last_words = (self._last_words + chunk)[-TAIL:]
                with suppress(OSError):  # a terminal that is gone
                    out.write(chunk)


POLL_S = 0.2


@dataclass(frozen=True)
class SentWeight:
    """Description of one tensor of a sync. On the CPU the file descriptor of its shared memory follows.

    Attributes:
        name: The trainer's name of the tensor.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        pieces: Slices that this rank's part of the engine holds; on the CPU only these are in the shared memory. Empty
            where the engine does not name its pieces; then the whole tensor is.
        fingerprints: Fingerprint of each piece, or of the whole tensor, taken before the copy.
        on_gpu: Function and arguments that open the tensor in the GPU's memory; None on the CPU.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    fingerprints: tuple[int, ...]
    on_gpu: tuple[Callable[..., Tensor], tuple[Any, ...]] | None = None


def main(descriptor: int, parent: int, timeout_s: float) -> None:
    """Entry of the engine's process: serve the rank at the other end of the socket until it closes it or is gone.

    Args:
        descriptor: File descriptor of the socket, inherited from the rank's process.
        parent: Process id of the rank.
        timeout_s: Timeout of each collective in the engine's own process group.
    """
    for number in SIGNALS:  # the whole group receives them; they are the rank's, with which this process ends
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_follow, args=(parent,), daemon=True, name="parent-watch").start()
    connection = Connection(descriptor)
    try:
        engine = connection.recv()
        _join(timeout_s)
        _serve(connection, engine)
    except (EOFError, ConnectionError):
        pass  # the rank is gone, or has closed the engine
    os._exit(0)  # taking torch and vLLM down in good order costs seconds, and prints


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)


def _join(timeout_s: float) -> None:
    """Form the engine's own group, of one process too: in a group vLLM takes the GPU that `LOCAL_RANK` names."""
    limit = datetime.timedelta(seconds=timeout_s)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    if size > 1:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


def _serve(connection: Connection, engine: RolloutEngine) -> None:
    """Call the methods of the engine that the rank names; send its policy version, the result and the error of each.

    The text of an error other than `UserError` and `WeightSyncError` names its class, such as `ZeroDivisionError:
    division by zero`.
    """
    while True:
        method, arguments = connection.recv()
        if method == "update_weights":
            arguments = (_buckets(connection), *arguments)
        result: Any = None
        error: Exception | None = None
        try:
            result = getattr(engine, method)(*arguments)
        except (UserError, WeightSyncError) as raised:
            error = raised
        except Exception as raised:
            error = EngineProcessError(f"{type(raised).__name__}: {raised}")
            error.add_note(traceback.format_exc())
        connection.send((engine.policy_version, result, error))


def _buckets(connection: Connection) -> Iterator[list[tuple[str, Tensor]]]:
    """Ask for weights one by one, and yield each as a bucket of its own."""
    connection.send(None)
    while (weight := connection.recv()) is not None:
        tensor = _opened(connection, weight)
        if fingerprints(tensor, weight.pieces) != weight.fingerprints:
            raise WeightSyncError(
                f"`{weight.name}` reached the engine's process with other values than were sent; resume the run, and"
                " report this as a bug if it happens again"
            )
        yield [(weight.name, tensor)]
        del tensor
        connection.send(None)


def _opened(connection: Connection, weight: SentWeight) -> Tensor:
    if weight.on_gpu is not None:
        rebuild, arguments = weight.on_gpu
        return rebuild(*arguments)
    descriptor = recv_handle(connection)
    tensor = mapped(descriptor, weight.shape, weight.dtype)
    os.close(descriptor)
    return tensor


def fingerprints(tensor: Tensor, pieces: Sequence[Piece]) -> tuple[int, ...]:
    """The fingerprint of each piece, or of the whole tensor where there are none."""
    parts = [piece.sent(tensor) for piece in pieces] or [tensor]
    return tuple(torch.stack([fingerprint(part) for part in parts]).tolist())


def share(tensor: Tensor, parts: Sequence[Callable[[Tensor], Tensor]] = ()) -> int:
    """Copy a tensor of the CPU into shared memory (`memfd_create`).

    It needs no room in `/dev/shm`, and is counted as memory of the processes that map it.

    Args:
        tensor: Tensor to copy.
        parts: Functions from a tensor to views of it, such as `Piece.cut`. Only these views are copied; other elements
            read as 0 and take no memory, except where they share a page with a view. Empty for the whole tensor.

    Returns:
        A file descriptor, which the caller closes once the other process has it.
    """
    descriptor = os.memfd_create("rlflow-weight")
    os.ftruncate(descriptor, tensor.nbytes)
    there = mapped(descriptor, tensor.shape, tensor.dtype)
    for part in parts or (Tensor.detach,):
        part(there).copy_(part(tensor))
    return descriptor


def mapped(descriptor: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor in shared memory, without a copy; the memory lasts as long as a tensor or a view in any process."""
    memory = mmap.mmap(descriptor, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
