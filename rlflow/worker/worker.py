"""`Worker`, a process that runs one call at a time and is killed with all that it started; and `WorkerPool`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar
from uuid import uuid4

import psutil

from rlflow.errors import UserError
from rlflow.worker.output import Output

CHILD = Path(__file__).with_name("child.py")
MB = 1 << 20
MARK = "RLFLOW_WORKER"  # in the environment of a worker, and of all that it starts
KILL_ROUNDS = 1000
OUTPUT_SECONDS = 1.0  # that the end of the output is waited for: a process whose parents ended before may print on

Result = TypeVar("Result")


@dataclass(frozen=True)
class Limits:
    """Limits of code in a `Worker` or a `Sandbox`.

    A call that takes longer than `timeout_s` is ended by killing its process. Memory and file size are limits of the
    operating system: beyond them Python code gets a `MemoryError` or an `OSError`.

    Args:
        timeout_s: Wall-clock seconds of one call. A worker's start and imports do not count.
        start_timeout_s: Seconds of the import of a module in a worker, with the start of its process.
        memory_mb: MB of address space of each process, which is more than the memory it uses; None for no limit.
        file_mb: MB of the largest file that the code may write.
        output_kb: kB of its output that are stored; the rest is read and dropped.
    """

    timeout_s: float = 60.0
    start_timeout_s: float = 120.0
    memory_mb: int | None = 4096
    file_mb: int = 256
    output_kb: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise UserError(f"`{name}` is {value}; give more than 0")


class WorkerError(Exception):
    """A call of a worker returned no value; the text says why."""


class WorkerRaised(WorkerError):
    """The code raised an error, or arguments or value are not JSON. The worker and its object stay usable."""


class WorkerDied(WorkerError):
    """The process ended during a call, or was gone before it: it exited, was killed, or sent an invalid answer."""


class WorkerTimeout(WorkerDied):
    """The call took longer than its limit, so its process was killed."""


class Worker:
    """A process that runs one call at a time; it starts with the first.

    After its death `begin`, `make` and calls of functions start it again; a method or attribute of the lost object is
    a `WorkerDied`.

    Arguments and values are sent as JSON: a tuple arrives as a list, a dataclass comes back as a dict. A worker is for
    one thread at a time; threads share a `WorkerPool`.

        worker = Worker(Limits(timeout_s=10))
        worker.function("my_rewards.brevity", "a response")  # -10.0; a `WorkerTimeout` after 10 seconds
        worker.make("my_env.WordGame", word="house")  # an object that stays in the worker
        worker.call("guess", letter="o")  # what its method returns
        worker.close()

    Every call raises a `WorkerError` if there is no value: `WorkerRaised`, `WorkerTimeout` or `WorkerDied`.

    Args:
        limits: Limits of each call.

    Attributes:
        printed: The end of the code's output, at most `limits.output_kb`.
        starts: Number of times the process was started.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.starts = 0
        self._mark = uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._output: Output | None = None

    @property
    def printed(self) -> str:
        return "" if self._output is None else self._output.last_text

    @property
    def runs(self) -> bool:
        """Whether the process is alive, so that the object of `make` is still there."""
        return self._process is not None and not _ended(self._process)

    def begin(self, seed: int, paths: Sequence[str]) -> None:
        """Begin a conversation: import the modules of dotted paths, then seed `random`, and NumPy if it is imported.

        Args:
            seed: Seed of the conversation.
            paths: Dotted paths, such as `my_env.WordGame` of the module `my_env`.
        """
        self._start()
        for path in paths:
            self._import(path)
        self._of_child("seed", seed)

    def draws(self) -> Any:
        """The states of `random` and NumPy as JSON; None where nothing was drawn since `begin`."""
        return self._of_child("draws")

    def set_draws(self, states: Any) -> None:
        """Set the states of `random` and NumPy to what `draws` returned; after `begin`."""
        self._of_child("set_draws", *states)

    def make(self, path: str, /, **given: Any) -> None:
        """Store in the worker what the class or function at a dotted path returns, in place of the object before."""
        self._import(path)
        self._ask({"make": path, "given": given}, path)

    def call(self, method: str, /, *args: Any, **given: Any) -> Any:
        """The value that a method of the stored object returns; a coroutine is awaited."""
        return self._ask({"call": method, "args": args, "given": given}, method)

    def read(self, name: str) -> Any:
        """An attribute of the stored object; None where it has none."""
        return self._ask({"read": name}, name)

    def function(self, path: str, /, *args: Any, **given: Any) -> Any:
        """The value that the function at a dotted path returns; a coroutine is awaited."""
        self._import(path)
        return self._ask({"function": path, "args": args, "given": given}, path)

    def batch(self, path: str, given: dict[str, Any], state: dict[str, Any] | None, logs: list[str]) -> list[Any]:
        """Call the reward function at a dotted path for a batch; arguments and result are those of `batch_call`."""
        self._import(path)
        value = self._ask({"function": "__main__.batch_at", "args": [path, given, state, logs]}, path)
        assert isinstance(value, list)
        return value

    def text(self, name: str, method: bool, given: Mapping[str, Any]) -> str:
        """The text that a tool returns, by `str` in the worker.

        Args:
            name: Name of a method of the stored object, or dotted path of a function.
            method: Whether it is a method.
            given: Keyword arguments.
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
        _kill_all(process.pid, self._mark)
        process.wait()
        self._socket.close()
        assert self._output is not None
        self._output.join(OUTPUT_SECONDS)  # it ends when all processes that can print are gone

    def adopt(self) -> None:
        """Make processes that the code starts children of the worker once their parent has ended, in any session."""
        self._start()
        self._of_child("adopt")

    def close_if_others_run(self) -> None:
        """Call `close` if processes are left that the code started after `adopt`; the next call starts a worker."""
        if self._process is not None and (not self.runs or psutil.Process(self._process.pid).children()):
            self.close()

    def kill(self) -> None:
        """Kill the process, so that a call in progress fails; may be called from another thread."""
        process = self._process
        if process is not None:
            process.kill()

    def _import(self, path: str) -> None:
        """Import the module of `path`, so that no call waits for it."""
        self._start()
        module = path.rpartition(".")[0]
        if module not in self._imported:
            self._ask({"function": "__main__.load", "args": [module]}, module, self.limits.start_timeout_s)
            self._imported.add(module)

    def _of_child(self, function: str, *args: Any) -> Any:
        """The value of a function of `child.py`, within `limits.start_timeout_s`."""
        return self._ask({"function": f"__main__.{function}", "args": args}, function, self.limits.start_timeout_s)

    def _ask(self, request: dict[str, Any], asked: str, seconds: float | None = None) -> Any:
        if not self.runs:
            raise WorkerDied(f"`{asked}` was called of an object whose process is gone")
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise WorkerRaised(f"`{asked}` cannot be given as JSON what it was called with: {error}") from error
        seconds = self.limits.timeout_s if seconds is None else seconds
        until = time.monotonic() + seconds
        try:
            self._wait_until(until)
            self._socket.sendall(line)
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
        """Start a process, unless there is one that takes a call."""
        if self.runs:
            return
        self.close()
        # In addition to the marks of the workers that this process runs in.
        environment = {**os.environ, MARK: " ".join([*os.environ.get(MARK, "").split(), self._mark])}
        self._socket, of_child = socket.socketpair()
        settings = {
            "parent": os.getpid(),
            "socket": of_child.fileno(),
            "path": [str(Path(entry).absolute()) for entry in sys.path],
            "file_bytes": self.limits.file_mb * MB,
            "memory_bytes": None if self.limits.memory_mb is None else self.limits.memory_mb * MB,
        }
        command = [sys.executable, "-I", "-u", str(CHILD), json.dumps(settings)]
        with of_child:
            starts = _lasting_thread().submit(
                lambda: subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(of_child.fileno(),),
                    start_new_session=True,
                    env=environment,
                )
            )
            self._process = starts.result()
        self.starts += 1
        self._imported: set[str] = set()
        self._rest = b""
        assert self._process.stdout is not None
        self._output = Output(self._process.stdout, last=self.limits.output_kb << 10)

    def _received(self, until: float) -> bytes:
        parts = [self._rest]
        while b"\n" not in parts[-1]:
            self._wait_until(until)
            part = self._socket.recv(1 << 16)
            if not part:
                raise EOFError
            parts.append(part)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line

    def _wait_until(self, until: float) -> None:
        """Let sends and receives raise a `TimeoutError` at the time `until`."""
        self._socket.settimeout(max(0.001, until - time.monotonic()))

    def _ending(self) -> str:
        """End of the process in words: `was killed by SIGKILL; its last line was 'loading'`; closes the worker."""
        process = self._process
        assert process is not None
        left = _ended(process, 1.0)
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
    """A fixed number of workers for calls from several threads: each call takes a free worker, or waits for one.

        pool = WorkerPool(Limits(timeout_s=10), workers=4)
        pool.call(Worker.function, "my_rewards.brevity", "a response")  # -10.0

    A copy by `pickle` or `deepcopy` has workers of its own.

    Args:
        limits: Limits of each call.
        workers: Number of workers; the process of each starts with its first call.
    """

    def __init__(self, limits: Limits, workers: int) -> None:
        self._made = limits, workers
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for _ in range(workers):
            self._free.put(Worker(limits))

    def call(self, method: Callable[..., Result], /, *args: Any, **given: Any) -> Result:
        """The value that this method of `Worker` returns on a free worker, with these arguments.

        Raises:
            WorkerError: The call returned no value, see `Worker`.
        """
        worker = self._free.get()
        try:
            return method(worker, *args, **given)
        finally:
            self._free.put(worker)

    def __reduce__(self) -> tuple[type[WorkerPool], tuple[Limits, int]]:
        return WorkerPool, self._made


@cache
def _lasting_thread() -> ThreadPoolExecutor:
    """A thread that lasts as long as this process; a worker dies with the thread that started it, see prctl(2)."""
    return ThreadPoolExecutor(1, thread_name_prefix="starts-workers")


def _ended(process: subprocess.Popen[bytes], seconds: float = 0.0) -> bool:
    """Whether a process ends within `seconds`. It stays a zombie, so that no other process gets its id; see wait(2)."""
    until, pause = time.monotonic() + seconds, 0.0005
    while True:
        try:
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
        except ChildProcessError:  # somebody waited for it
            return True
        if (left := until - time.monotonic()) <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, 0.05)


def _kill_all(leader: int, mark: str) -> None:
    """Kill a worker, its descendants and session, and whatever has its mark, until nothing is left that can be killed.

    Args:
        leader: Process id of the worker; it was not waited for yet, see `_ended`.
        mark: Value in the environment variable `MARK` of the worker and of all that it started.
    """
    known = _stopped_with_descendants(leader)
    looked_at: Iterable[psutil.Process] = psutil.process_iter()
    for _ in range(KILL_ROUNDS):
        belongs = {process: process in known or _belongs(process, leader, mark) for process in looked_at}
        known = {process for process, does in belongs.items() if does and _lives(process)}
        starting = [process for process, does in belongs.items() if does is None]
        if not known and not starting:
            return
        for stop_first in (signal.SIGSTOP, signal.SIGKILL):  # what is stopped starts nothing more
            for process in known:
                with suppress(psutil.Error):
                    process.send_signal(stop_first)
        time.sleep(0.001)
        only_starting = not known and all(map(_lives, starting))  # one that ended may have left others
        looked_at = starting if only_starting else psutil.process_iter()


def _stopped_with_descendants(leader: int) -> set[psutil.Process]:
    """A process and its descendants, which may have no mark and another session; stopped, so that no more come."""
    stopped: set[psutil.Process] = set()
    with suppress(psutil.NoSuchProcess):
        worker = psutil.Process(leader)
        while more := {worker, *worker.children(recursive=True)} - stopped:
            for process in more:
                with suppress(psutil.Error):
                    process.suspend()
            stopped |= more
    return stopped


def _belongs(process: psutil.Process, leader: int, mark: str) -> bool | None:
    """Whether a process is the worker, of its session, or has its mark; None while a program starts in it.

    Then it has no arguments or environment yet, and its mark cannot be read; see `begin_new_exec` of Linux.
    """
    try:
        if leader in (process.pid, os.getsid(process.pid)):
            return True
        if not process.environ() and not process.cmdline():
            return None if process.exe() else False  # a thread of the kernel has no program either, nor what ends
        return mark in process.environ().get(MARK, "").split()
    except (psutil.Error, OSError):  # it is gone, or another user's
        return False


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
