"""The process that waits for a command: its exit code is 0 only if the command came to its end.

A reward, a callback or a library may end its process by `os._exit(0)`, and nothing in that process can act afterwards.
So a run of `rlflow fit` is a child, forked before anything is loaded, and its parent waits. Signals that another
process sends to the parent are passed on; those of the terminal reach both.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import warnings
from typing import NoReturn

from rlflow.process import status
from rlflow.process.status import Status

PASSED_ON = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
ASKED_FOR = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE}  # whoever sent it knows
PR_SET_PDEATHSIG = 1


def supervise() -> None:
    """Return in a child process; this one waits for it, ends as it does, and never returns. On Linux only.

    The child's exit code, or the signal that killed it, is passed on. If it ends before `status.end` was called, one
    line says so, and the exit code is 1 where it would be 0. The child dies with its parent.
    """
    if sys.platform != "linux" or status.PARENT_VARIABLE in os.environ:  # rank 0 waits for the ranks that it starts
        return
    shared = Status.shared()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})
    with warnings.catch_warnings():
        # Python warns where there are threads: those of numpy's BLAS, which prepares itself for a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        _wait_for(child, shared)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    status.use(shared)
    os.environ[status.SUPERVISED_VARIABLE] = "1"


def _wait_for(child: int, shared: Status) -> NoReturn:
    while True:
        received = signal.sigwaitinfo(PASSED_ON | {signal.SIGCHLD})
        if received.si_signo == signal.SIGCHLD:
            pid, waited = os.waitpid(child, os.WNOHANG)
            if pid:
                break
        elif received.si_code <= 0:  # of a process; the kernel's are the terminal's, which the child got too
            os.kill(child, received.si_signo)
    code = os.waitstatus_to_exitcode(waited)
    if not shared.ended and -code not in ASKED_FOR:
        print(f"rlflow: error: rank {shared.rank} {shared.ending(code)}", file=sys.stderr, flush=True)
    if code < 0:
        _die_of(signal.Signals(-code))
    os._exit(code or (0 if shared.ended else 1))


def _die_of(what: signal.Signals) -> None:
    """So that a shell or torchrun sees what became of the child."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it has left its own
    if what != signal.SIGKILL:
        signal.signal(what, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {what})
    os.kill(os.getpid(), what)
    os._exit(128 + what)  # the first process of a container does not die of signals
