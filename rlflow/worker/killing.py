"""Kills a process with all that it has started, whatever sessions these left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

MARK = "RLFLOW_WORKER"  # in the environment of a process that may be killed so, and of all that it starts
KILL_ROUNDS = 1000
PF_KTHREAD = 0x00200000  # a flag of the kernel's own threads


def ended(process: subprocess.Popen[bytes], seconds: float = 0.0) -> bool:
    """Whether a process ends in this time. It stays a zombie, so that no other process gets its id; see wait(2)."""
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


def marked(mark: str) -> dict[str, str]:
    """What a process is started with to have this mark, beside those of the workers that this process runs in."""
    return {MARK: " ".join([*os.environ.get(MARK, "").split(), mark])}


def kill_all(leader: int, mark: str) -> None:
    """Kill a worker, its session, and whatever else has its mark, until nothing is left that can be killed.

    Args:
        leader: Its process, which nobody has waited for yet, see `ended`.
        mark: That all have which it started.
    """
    looked_at = _processes()
    for _ in range(KILL_ROUNDS):
        belongs = {pid: _belongs(pid, leader, mark) for pid in looked_at}
        left = [pid for pid in looked_at if belongs[pid] is not False and _state(pid) not in "ZX"]
        known = [pid for pid in left if belongs[pid]]
        if not left:
            return
        for stop_first in (signal.SIGSTOP, signal.SIGKILL):  # what is stopped starts nothing more
            for pid in known:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, stop_first)
        time.sleep(0.001)
        looked_at = _processes() if known else left


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _belongs(pid: int, leader: int, mark: str) -> bool | None:
    """Whether a process is the worker, of its session, or has its mark.

    None of one that has no memory, or not yet that of its program: it ends, or a program starts in it, and its mark
    cannot be read; see `exit_mm` and `begin_new_exec` of Linux.
    """
    try:
        if pid == leader or os.getsid(pid) == leader:
            return True
        environment = _read(pid, "environ")
        if not environment:
            if not _read(pid, "cmdline"):
                return False if _is_of_kernel(pid) else None
            environment = _read(pid, "environ")  # its program has started meanwhile, or has none
    except OSError:  # it is gone, or another user's
        return False
    return any(entry.startswith(f"{MARK}=".encode()) and mark.encode() in entry for entry in environment.split(b"\0"))


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except ProcessLookupError:  # what some kernels say of a process without memory
        return b""


def _is_of_kernel(pid: int) -> bool:
    return bool(int(_status(pid)[6]) & PF_KTHREAD)


def _state(pid: int) -> str:
    """One letter, as of `ps`; X of a process that is gone."""
    return _status(pid)[0]


def _status(pid: int) -> list[str]:
    """What follows a process's name in `/proc/[pid]/stat`, see proc(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0", "0", "0", "0", "0", "0"]
