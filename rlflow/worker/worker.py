"""`Worker`, a process that runs one call at a time and can be killed with all that it has started; pools of them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any
from uuid import uuid4

from rlflow.errors import UserError
from rlflow.worker.killing import ended, kill_all, marked

CHILD = Path(__file__).with_name("child.py")
MB = 1 << 20
PIPE_BYTES = 4096  # that can be written at once where a pipe is writable


@dataclass(frozen=True)
class Limits:
    """What the code in a worker may take; a call that takes more ends, and its worker with it.

    Args:
        seconds: Of one call, waiting included; the start of a process and its imports do not count.
        start_seconds: Of the start of a process and of the import of a module.
        memory_mb: Of a process of the worker, in address space, which is more than what it touches; None for no limit.
        file_mb: The largest file that it may write.
        output_kb: What is kept of what it prints; the rest is read and dropped.
    """

    seconds: float = 60.0
    start_seconds: float = 120.0
    memory_mb: int | None = 4096
    file_mb: int = 256
    output_kb: int = 64

    def __post_init__(self) -> None:
        for name in ("seconds", "start_seconds", "memory_mb", "file_mb", "output_kb"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"`{name}` is {value}; give more than 0")


class WorkerError(Exception):
    """A call gave no value; the text says why."""


class WorkerRaised(WorkerError):
    """The code raised. The worker goes on."""


class WorkerTimeout(WorkerError):
    """The call took longer than it may. Its worker is dead."""


class WorkerDied(WorkerError):
    """The process ended within a call: it left, was killed, or gave what is no answer."""


class Worker:
    """A process of a session of its own; it starts with the first call, and anew with the call after its death.

    Calls are given and answered as JSON. Several threads take a worker each, not one together.

    Args:
        limits: What a call may take.

    Attributes:
        printed: The last that the code printed, at most `limits.output_kb`.
        starts: How often the process was started.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.starts = 0
        self._mark = uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._printed = bytearray()

    @property
    def printed(self) -> str:
        return bytes(self._printed).decode(errors="replace")

    @property
    def runs(self) -> bool:
        """Whether there is a process that takes a call, with what it keeps."""
        return self._process is not None and not ended(self._process)

    def begin(self, seed: int, paths: Sequence[str]) -> None:
        """Import the modules of these paths; then seed `random`, and NumPy where one of them has imported it."""
        if not self.runs:
            self.close()
            self._start()
        for path in paths:
            self._import(path)
        self._ask({"seed": seed}, "seed", self.limits.start_seconds)

    def draws(self) -> Any:
        """The states of `random` and NumPy as JSON; None where nothing was drawn since `begin`."""
        return self._ask({"draws": None}, "draws", self.limits.start_seconds)

    def set_draws(self, states: Any) -> None:
        """Let what is drawn follow from states that `draws` gave."""
        self._ask({"set_draws": states}, "draws", self.limits.start_seconds)

    def make(self, path: str, /, **given: Any) -> None:
        """Keep an object in the worker, in place of the one before: what the class or function at `path` returns."""
        self._import(path)
        self._ask({"make": path, "given": given}, path)

    def call(self, method: str, /, *args: Any, **given: Any) -> Any:
        """What a method of the object kept returns; a coroutine is awaited."""
        return self._ask({"call": method, "args": args, "given": given}, method)

    def read(self, name: str) -> Any:
        """An attribute of the object kept; None where it has none."""
        return self._ask({"read": name}, name)

    def function(self, path: str, /, *args: Any, **given: Any) -> Any:
        """What the function at `path` returns.

        Raises:
            WorkerError: It gave no value, for one of the reasons that its subclasses say.
        """
        self._import(path)
        return self._ask({"function": path, "args": args, "given": given}, path)

    def batch(self, path: str, given: dict[str, Any], state: dict[str, Any] | None, logs: list[str]) -> list[Any]:
        """See `batch_call`, of the function at `path`.

        Raises:
            WorkerError: It gave no value, for one of the reasons that its subclasses say.
        """
        self._import(path)
        value = self._ask({"batch": path, "given": given, "state": state, "logs": logs}, path)
        assert isinstance(value, list)
        return value

    def text(self, name: str, method: bool, given: Mapping[str, Any]) -> str:
        """What a method of the object kept, or else a function, returns, as the text that `str` makes of it there.

        Raises:
            WorkerError: It gave no value, for one of the reasons that its subclasses say.
        """
        if not method:
            self._import(name)
        value = self._ask({"call" if method else "function": name, "given": given, "text": True}, name)
        assert isinstance(value, str)
        return value

    def close(self) -> None:
        """Kill the process and all that it started, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        kill_all(process.pid, self._mark)
        process.wait()
        for pipe in (self._requests, self._answers):
            os.close(pipe)
        self._reader.join()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _import(self, path: str) -> None:
        """Import the module of `path`, so that no call waits for it."""
        if not self.runs:
            self.close()
            self._start()
        module = path.rpartition(".")[0]
        if module not in self._imported:
            self._ask({"import": module}, module, self.limits.start_seconds)
            self._imported.add(module)

    def _ask(self, request: dict[str, Any], asked: str, seconds: float | None = None) -> Any:
        if not self.runs:
            raise WorkerDied(f"`{asked}` was called of an object whose process is gone")
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise WorkerRaised(f"`{asked}` cannot be given as JSON what it was called with: {error}") from error
        seconds = self.limits.seconds if seconds is None else seconds
        until = time.monotonic() + seconds
        try:
            self._send(line, until)
            answer = json.loads(self._received(until))
        except TimeoutError:
            self.close()
            raise WorkerTimeout(f"`{asked}` took longer than {seconds:g} s") from None
        except (EOFError, OSError):
            raise WorkerDied(f"`{asked}` {self._ending()}") from None
        except ValueError:
            self.close()
            raise WorkerDied(f"`{asked}` wrote into the answers of its worker") from None
        if "raised" in answer:
            where = f" at {answer['where']}" if answer["where"] else ""
            raise WorkerRaised(f"`{asked}` raised {answer['raised']}{where}: {answer['text']}")
        return answer["value"]

    def _start(self) -> None:
        to_child, self._requests = os.pipe()
        self._answers, from_child = os.pipe()
        os.set_blocking(self._requests, False)
        settings = {
            "parent": os.getpid(),
            "path": [str(Path(entry).absolute()) for entry in sys.path],
            "requests": to_child,
            "answers": from_child,
            "file_bytes": self.limits.file_mb * MB,
            "memory_bytes": None if self.limits.memory_mb is None else self.limits.memory_mb * MB,
        }
        command = [sys.executable, "-I", "-u", str(CHILD), json.dumps(settings)]
        self._process = _lasting_thread().submit(self._spawned, command, (to_child, from_child)).result()
        for pipe in (to_child, from_child):
            os.close(pipe)
        self.starts += 1
        self._printed.clear()
        self._imported: set[str] = set()
        self._rest = b""
        self._reader = threading.Thread(target=self._read_output, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _spawned(self, command: list[str], pipes: tuple[int, ...]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=pipes,
            start_new_session=True,
            env={**os.environ, **marked(self._mark)},
        )

    def _send(self, line: bytes, until: float) -> None:
        rest = memoryview(line)
        while rest:
            _, writable, _ = select.select([], [self._requests], [], max(0.0, until - time.monotonic()))
            if not writable:
                raise TimeoutError
            rest = rest[os.write(self._requests, rest[:PIPE_BYTES]) :]

    def _received(self, until: float) -> bytes:
        parts = [self._rest]
        while b"\n" not in parts[-1]:
            readable, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            if not readable:
                raise TimeoutError
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise EOFError
            parts.append(part)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line

    def _read_output(self, pipe: IO[bytes]) -> None:
        """Until all processes that can print are gone."""
        most = self.limits.output_kb << 10
        with pipe:
            while part := os.read(pipe.fileno(), 1 << 16):
                self._printed += part
                del self._printed[:-most]

    def _ending(self) -> str:
        """What became of the process, which is gone or closed its pipes."""
        process = self._process
        assert process is not None
        left = ended(process, 1.0)
        self.close()
        last = self.printed.strip().rpartition("\n")[2]
        said = f"; its last line was {last!r:.200}" if last else ""
        if not left:
            return f"closed the pipe of its answers{said}"
        code = process.returncode
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}{said}"
        return f"ended its process with code {code}{said}"


class WorkerPool:
    """Some workers, of which each call takes a free one, or waits for it. Threads may call it side by side.

    A copy has workers of its own.

    Args:
        limits: What a call may take.
        workers: How many processes.
    """

    def __init__(self, limits: Limits, workers: int) -> None:
        self._made = limits, workers
        self._workers = [Worker(limits) for _ in range(workers)]
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)

    def function(self, path: str, /, *args: Any, **given: Any) -> Any:
        """What the function at `path` returns.

        Raises:
            WorkerError: It gave no value.
        """
        with self._worker() as worker:
            return worker.function(path, *args, **given)

    def batch(self, path: str, given: dict[str, Any], state: dict[str, Any] | None, logs: list[str]) -> list[Any]:
        """See `batch_call`, of the function at `path`.

        Raises:
            WorkerError: It gave no value.
        """
        with self._worker() as worker:
            return worker.batch(path, given, state, logs)

    @contextmanager
    def _worker(self) -> Iterator[Worker]:
        worker = self._free.get()
        try:
            yield worker
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """Kill all processes; a later call starts new ones."""
        for worker in self._workers:
            worker.close()

    def __reduce__(self) -> tuple[type[WorkerPool], tuple[Limits, int]]:
        return WorkerPool, self._made


@cache
def _lasting_thread() -> ThreadPoolExecutor:
    """One that lasts as long as this process: a worker that dies with its parent dies with its thread, prctl(2)."""
    return ThreadPoolExecutor(1, thread_name_prefix="starts-workers")
