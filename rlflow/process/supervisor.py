"""Supervises a run from a parent process that exits with 0 only if the run came to its end.

A reward, a callback or a library may end its process by `os._exit(0)`, and nothing in that process can act afterwards;
one that is stopped, or held by code in C, cannot act either. So a run of `rlflow fit` is a child, forked before
anything is loaded; its parent waits for it and watches the ranks of this machine. Signals that another process sends to
the parent are passed on to the child; those of the terminal reach both. Processes that the run started and left running
are ended after it. A command that is done exits, even if the user's code still runs in threads of its process.

    rlflow fit               waits for rank 0, passes signals on to it, reads the board (this file)
      rank 0                 the command itself; waits for the other ranks (`strategies/launcher.py`)
        rank 1, rank 2, ...  the same command once more, with LOCAL_RANK; each writes what it does to the board
          workers, engines   of any rank, in processes of their own (`worker/`, `rollout/engine_subprocess.py`)
"""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil

from rlflow.errors import readable
from rlflow.process import status
from rlflow.process.scratch import make_scratch
from rlflow.process.status import StatusBoard

PASSED_ON = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
ASKED_FOR = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE}  # whoever sent it knows
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 1.0
GRACE_S = 4.0  # how long ranks may still take to end in their own words, after a collective has failed
SLACK_S = 10.0  # beyond `timeout_s`, in which the ranks that wait find out by themselves
UNKNOWN_S = 1800.0  # the limit where no other rank waits, or none is known yet
EXIT_S = 10.0  # for threads, processes of `multiprocessing` and exit handlers
HELD_S = 30.0  # the limit of a child that has come to its end; `leave` has given it `EXIT_S`, where Python runs
LEAVING_S = 5.0  # how long what the run started may outlive it


def supervise() -> None:
    """Fork. The call returns in the child, which runs the command; the parent supervises it and never returns.

    Called once by `rlflow fit` and `rlflow validate` before anything is loaded; on Linux only, elsewhere it does
    nothing. A rank that rank 0 has started is not forked again.

    The parent exits with the child's code, or dies of the signal that killed the child. If the child ends before
    `status.end` was called, one line says so, and the exit code is 1 where it would be 0:

        rlflow: error: rank 0 on gpu-17 exited with code 0 (step 3), before the run came to its end

    If a rank's interpreter on this machine has not run for its `timeout_s`, the run ends with code 1 and a line that
    names the rank; if no other rank waits for it, after half an hour. If a child's interpreter has not run for `HELD_S`
    after the run's end, the child is killed, and the parent exits with the code that the child had noted. The child
    dies with its parent.
    """
    if status.PARENT_VARIABLE in os.environ:  # of a rank that rank 0 started, which waits for it
        status.start_heartbeat()
        die_with(int(os.environ[status.PARENT_VARIABLE]))
        return
    if sys.platform != "linux":
        return
    board = StatusBoard.make()
    status.use(board)
    parent, scratch = os.getpid(), make_scratch()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent may have had it ignored: then no signal of a child arrives
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})
    with warnings.catch_warnings():
        # Python warns where there are threads: those of numpy's BLAS, which prepares itself for a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        _Supervisor(child, board, scratch).wait()
    die_with(parent)
    status.use(board)
    status.start_heartbeat()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)  # a signal that ends it is noted on the board
    os.environ[status.SUPERVISED_VARIABLE] = "1"


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, of process id `parent`, dies; on Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


class _Supervisor:
    """Waits for a child, and kills it and all ranks of this machine when one of them is missing."""

    def __init__(self, child: int, board: StatusBoard, scratch: Path) -> None:
        self._child = child
        self._scratch = scratch
        self._board = board
        self._shared = status.mine()
        # By process: its last heartbeat, and seconds since, as seen here.
        self._silent: dict[int, tuple[float, float]] = {}
        self._missing: str | None = None
        self._held = False  # whether the child had come to its end, and had to be ended
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent becomes a child of this process

    def wait(self) -> NoReturn:
        """Pass signals on and watch the ranks until the child has ended, then end this process as it ended."""
        code, looked = None, time.monotonic()
        while code is None:
            received = signal.sigtimedwait(PASSED_ON | {signal.SIGCHLD}, POLL_S)
            if received is not None and received.si_signo == signal.SIGCHLD:
                code = self._reaped()
            elif received is not None and (received.si_code <= 0 or received.si_signo == signal.SIGHUP):
                # Sent by a process. The kernel sends the signals of a terminal's keys to both processes, and SIGHUP of
                # a terminal that closes to this one alone.
                os.kill(self._child, received.si_signo)
            now = time.monotonic()
            if self._missing is None and now - looked >= POLL_S:
                self._missing = self._looked(min(now - looked, 2 * POLL_S))  # it may have been stopped itself
                looked = now
                if self._missing is not None:
                    self._kill()
                elif code is None and self._shared.ended and self._silent.get(self._child, (0.0, 0.0))[1] > HELD_S:
                    self._held = True
                    os.kill(self._child, signal.SIGKILL)
        self._end_the_rest()
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._end(code)

    def _looked(self, seconds: float) -> str | None:
        """Age each heartbeat that has not changed by `seconds`; return a line about a rank that is missing, or None."""
        for each in self._board.begun():
            heartbeat, silent = self._silent.get(each.process, (0.0, 0.0))
            self._silent[each.process] = each.heartbeat, silent + seconds if each.heartbeat == heartbeat else 0.0
        begun = [each for each in self._board.begun() if not each.ended]
        for each in begun:
            if self._silent[each.process][1] > (each.limit_s + SLACK_S if each.limit_s else UNKNOWN_S):
                return each.silence
        failed = any(each.failed and time.monotonic() - each.failed > GRACE_S for each in begun)
        return self._board.missing() if failed else None

    def _reaped(self) -> int | None:
        """Reap all children that have ended; the exit code of the one that is waited for, if it is among them."""
        code = None
        while True:
            try:
                process, waited = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return code
            if process == 0:
                return code
            if process == self._child:
                code = os.waitstatus_to_exitcode(waited)

    def _kill(self) -> None:
        """Kill all ranks of this machine by SIGKILL."""
        processes = {each.process for each in self._board.begun()}
        for child in psutil.Process().children(recursive=True):
            if child.pid in processes or child.pid == self._child:
                _sent(child, signal.SIGKILL)

    def _end_the_rest(self) -> None:
        """End what the run started and left running, such as children of rewards: SIGTERM first, then SIGKILL."""
        deadline = time.monotonic() + LEAVING_S
        asked = False
        while left := psutil.Process().children(recursive=True):
            remains = deadline - time.monotonic()
            if remains < -LEAVING_S:  # the kernel holds it
                return
            if remains < 0 or (not asked and remains < LEAVING_S / 2):
                for child in left:
                    _sent(child, signal.SIGKILL if asked else signal.SIGTERM)
                asked = True
            self._reaped()
            time.sleep(0.02)

    def _end(self, code: int) -> NoReturn:
        shared = self._shared
        if self._missing is not None:
            _say(f"{self._missing}; ended the run{self._board.resume_advice}")
            os._exit(1)
        if self._held:
            line = f"{shared.named}: code in C still held it {HELD_S:.0f} s after all was done; ended with it"
            print(f"rlflow: {line}", file=sys.stderr, flush=True)
            os._exit(shared.code)
        if not shared.ended and -code not in ASKED_FOR:
            _say(f"{shared.named} {shared.ending(code)}{self._board.resume_advice}")
        if code < 0:
            _die_of(signal.Signals(-code))
        os._exit(code or (shared.code if shared.ended else 1))


def _sent(child: psutil.Process, what: signal.Signals) -> None:
    try:
        child.send_signal(what)
    except psutil.NoSuchProcess:
        return


def _say(line: str) -> None:
    print(f"rlflow: error: {line}", file=sys.stderr, flush=True)


def _die_of(what: signal.Signals) -> None:
    """End by the signal that killed the child, so that a shell or torchrun sees it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it has left its own
    if what != signal.SIGKILL:
        signal.signal(what, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {what})
    os.kill(os.getpid(), what)
    os._exit(128 + what)  # the first process of a container does not die of signals


_first: list[Callable[[], None]] = []


def before(function: Callable[[], None]) -> None:
    """Register a function that `leave` calls first, or Python at exit without `leave`. It must limit its own time."""
    atexit.register(function)
    _first.append(function)


def leave(code: int) -> None:
    """Call the functions registered by `before`, then give Python `EXIT_S` to end this process by itself.

    Python waits at its end for threads that are not daemons, and for processes of `multiprocessing`, without a limit.
    After `EXIT_S` one line names them, and the process exits with `code`.
    """
    while _first:
        function = _first.pop()
        atexit.unregister(function)
        function()
    threading.Thread(target=_end_after, args=(code,), daemon=True, name="leaving").start()


def _end_after(code: int) -> None:
    time.sleep(EXIT_S)
    line = f"{status.mine().named}: {_left()} still ran {EXIT_S:.0f} s after all was done; ended with it"
    print(f"rlflow: {readable(line)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def _left() -> str:
    """The threads and processes that Python still waits for: `process ForkProcess-1, thread uploader`."""
    import multiprocessing  # few processes need it

    processes = [process.name for process in multiprocessing.active_children() if not process.daemon]
    mine = (threading.current_thread(), threading.main_thread())
    threads = [each.name for each in threading.enumerate() if each not in mine and not each.daemon]
    named = [f"process {name}" for name in processes] + [f"thread {name}" for name in threads]
    return ", ".join(named) or "code that runs at exit"
