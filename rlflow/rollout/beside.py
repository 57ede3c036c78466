"""An engine in a process of its own beside its rank, for jobs in which only some ranks have engines."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rlflow.errors import UserError
from rlflow.rollout import engine_process
from rlflow.rollout.engine import NO_VERSION, Completion, EngineMemory, RolloutEngine, Sampling, SyncReport
from rlflow.rollout.engine_process import Done, End, Failed, Group, Taken, Weight, Withdrawn, fingerprints
from rlflow.rollout.manifest import Piece
from rlflow.rollout.shared import share

POLL_S = 0.2
END_S = 30.0  # how long an engine may take to close
DRAIN_S = 1.0  # how long to wait for the last of its errors
TAIL = 4096  # bytes of them that an error repeats

_stores: dict[str, Any] = {}  # where the processes of an engine meet, by address


class EngineProcessError(RuntimeError):
    """The process beside a rank died, hung, or failed in a way that is no user's and no sync's fault."""


class EngineBeside(RolloutEngine):
    """Does what `engine` does, in another process of the same machine.

    Weights reach it one by one by memory that both processes map: on the CPU of each tensor only the slices that this
    rank's part of the engine holds, on a GPU all of it (CUDA IPC), of which the engine takes its part.

    Every call raises what the engine raises: `UserError` and `WeightSyncError` with their text, anything else, a death
    and a timeout as `EngineProcessError`. The process ends with this one, however this one ends.

    Args:
        engine: As constructed; it is set up in the other process and never in this one.
        index: Of this rank among those that share the engine.
        size: How many share it.
        address: From `free_address` of the first of them; unused where there is one.
        timeout_s: Bounds every wait.
    """

    def __init__(self, engine: RolloutEngine, *, index: int, size: int, address: str, timeout_s: float = 600.0) -> None:
        assert size == engine.tensor_parallel_size, (size, engine.tensor_parallel_size)
        if timeout_s <= 0:
            raise UserError(f"`timeout_s` is {timeout_s}; an engine needs time to answer. Set more than 0 seconds.")
        self.tensor_parallel_size = size
        self._engine = engine
        self._group = Group(index, size, address, timeout_s)
        self._process: _Process | None = None
        self._pieces: dict[str, list[Piece]] = {}

    def memory_taken(self, rows: int, row_bytes: int, on_cpu: bool) -> EngineMemory:
        return self._engine.memory_taken(rows, row_bytes, on_cpu)

    def tell_experts(self) -> None:
        self._engine.tell_experts()

    def use_float32_head(self) -> None:
        self._engine.use_float32_head()

    def memory_settings(self, on_cpu: bool) -> tuple[str, ...]:
        return self._engine.memory_settings(on_cpu)

    def setup(
        self,
        model_path: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rank: int,
        world_size: int,
        local_rank: int,
        seed: int,
    ) -> None:
        if type(self._engine).__module__ == "__main__":
            raise UserError(
                f"`{type(self._engine).__name__}` is defined in the script that was started, which an engine's own"
                " process does not run; put the class into a module that can be imported"
            )
        self._dtype, self._device = dtype, device
        self._process = _Process(rank, self._group, local_rank)
        self._process.send((self._engine, self._group), "start")
        place = {"rank": self._group.index, "world_size": self._group.size, "local_rank": local_rank}
        try:
            self._call("setup", "set up its engine", model_path, dtype=dtype, device=device, seed=seed, **place)
            self._pieces = {}
            for piece in self._call("pieces", "say which weights it holds"):
                self._pieces.setdefault(piece.name, []).append(piece)
        except BaseException:
            self._process.end(0.0)
            raise

    def check_context(self, prompt: int, response: int) -> None:
        self._call("check_context", "check its context", prompt, response)

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling, version: int
    ) -> list[Completion]:
        asked = [list(map(int, prompt)) for prompt in prompts]
        doing = f"generate {len(asked)} responses"
        completions: list[Completion] = self._call("generate", doing, asked, list(seeds), sampling, version)
        return completions

    def update_weights(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        start = time.perf_counter()
        process, doing = self._running(), f"load the weights of version {version}"
        self.policy_version = NO_VERSION
        process.send(("update_weights", (version,), {}), doing)
        answer = self._stream(process, buckets, doing)
        report: SyncReport = self._result(answer, doing)
        return SyncReport(report.version, report.tensors, report.nbytes, time.perf_counter() - start)

    def sleep(self, keep_weights: bool = False) -> None:
        self._call("sleep", "sleep", keep_weights)

    def wake_up(self) -> None:
        if self._device.type != "cpu":  # what this process has freed its allocator keeps from the other
            torch.cuda.empty_cache()
        self._call("wake_up", "wake up")

    def close(self) -> None:
        process, self._process = self._process, None
        self.policy_version = NO_VERSION
        if process is not None and process.runs:
            with suppress(EngineProcessError):  # it is to end, and is ended
                process.send(("close", (), {}), "close")
                process.receive("close")
        if process is not None:
            process.end(END_S)
        if self._group.index == 0:
            _stores.pop(self._group.address, None)

    def _stream(self, process: _Process, buckets: Iterable[list[tuple[str, Tensor]]], doing: str) -> Any:
        """Send every weight, the next copied while the engine loads the one before it; the answer to them all."""
        weights = (named for bucket in buckets for named in bucket)
        loading = False
        while True:
            try:
                weight = self._shared(weights)
            except BaseException:
                if not loading or isinstance(process.receive(doing), Taken):
                    process.send(Withdrawn(), doing)
                    process.receive(doing)
                raise
            if loading:
                answer = process.receive(doing)
                if not isinstance(answer, Taken):  # it failed, or wants no more
                    if weight is not None and weight[1] is not None:
                        os.close(weight[1])
                    return answer
            if weight is None:
                process.send(End(), doing)
                return process.receive(doing)
            process.send(weight[0], doing, descriptor=weight[1])
            loading = True

    def _shared(self, weights: Iterator[tuple[str, Tensor]]) -> tuple[Weight, int | None] | None:
        """The next weight in the engine's dtype, its pieces in memory that both processes map; None after the last."""
        named = next(weights, None)
        if named is None:
            return None
        name, tensor = named[0], named[1].detach().to(self._dtype)
        pieces = tuple(self._pieces.get(name, ()))
        found = fingerprints(tensor, pieces)
        if tensor.is_cuda:
            # A copy, for the engine may keep it for longer than the trainer does; its memory is freed when both let go.
            on_gpu = reduce_tensor(tensor.clone())
            return Weight(name, tuple(tensor.shape), self._dtype, pieces, found, on_gpu), None
        parts = [piece.sent for piece in pieces]
        return Weight(name, tuple(tensor.shape), self._dtype, pieces, found), share(tensor, parts)

    def _call(self, method: str, doing: str, *arguments: Any, **keywords: Any) -> Any:
        process = self._running()
        process.send((method, arguments, keywords), doing)
        return self._result(process.receive(doing), doing)

    def _result(self, answer: Any, doing: str) -> Any:
        assert isinstance(answer, Done | Failed), answer
        self.policy_version = answer.policy_version
        if isinstance(answer, Done):
            return answer.result
        if answer.kind is not None:
            raise answer.kind(answer.text)
        error = EngineProcessError(f"{self._running().name} could not {doing}: {answer.text}")
        error.add_note(answer.trace)
        raise error

    def _running(self) -> _Process:
        assert self._process is not None, "the engine was not set up, or was closed"
        return self._process


def free_address() -> str:
    """Where the processes of an engine meet: `host:port` of a store in this process, the first of its ranks.

    The host is the address of this machine that reaches the job's `MASTER_ADDR`.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        host = probe.getsockname()[0]
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    address = f"{host}:{store.port}"
    _stores[address] = store
    return address


class _Process:
    """The process, and what goes to it and comes from it.

    It is started as a command of its own, so that the user's script is not run again. What it prints goes where this
    process's output goes at that moment; the end of its errors is kept, in case it dies.
    """

    def __init__(self, rank: int, group: Group, local_rank: int) -> None:
        self.name = f"rank {rank}: the process of its engine"
        self._timeout_s = group.timeout_s
        here, there = socket.socketpair()
        limit = struct.pack("ll", *divmod(round(group.timeout_s * 1e6), 10**6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # not to hang in the middle of a message either
            here.setsockopt(socket.SOL_SOCKET, option, limit)
        self._connection = Connection(here.detach())
        call = f"from {engine_process.__name__} import main; main({there.fileno()}, {os.getpid()})"
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-c", call],
            env=_environment(group, local_rank),
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
        """Send a message, and a file descriptor after it, which is closed here."""
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
        """Pass on what the process prints to its errors, and keep the end of it."""
        assert self._popen.stderr is not None
        with self._popen.stderr as stream, os.fdopen(errors, "wb", buffering=0) as out:
            while chunk := os.read(stream.fileno(), TAIL):
                self._last_words = (self._last_words + chunk)[-TAIL:]
                with suppress(OSError):  # a terminal that is gone
                    out.write(chunk)


def _environment(group: Group, local_rank: int) -> dict[str, str]:
    """This process's, but for the job that the rank is in: the engine's processes are a job of their own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "PET_"))}
    host, _, port = group.address.rpartition(":")
    return environment | {
        "RANK": str(group.index),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(group.size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # sums are in another order with other numbers of threads
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
        "PYTHONUNBUFFERED": "1",
    }
