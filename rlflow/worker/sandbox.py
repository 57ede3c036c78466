"""`Sandbox`, which runs programs that a model wrote, without network, files of users, or other processes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlflow.errors import UserError
from rlflow.worker.output import Output
from rlflow.worker.worker import MB, Limits

ISOLATE = Path(__file__).with_name("isolate.py")
DISK_MB = 64  # of what it may write, all in memory
PROCESSES = 64  # that a user who is not root may have in it
LAST = 4 << 10  # bytes
LINKER = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/alternatives")  # what finds shared libraries outside of `/usr`


@dataclass(frozen=True)
class SandboxResult:
    """Result of a program in a `Sandbox`.

    A program that prints `42` gives `SandboxResult("42\\n", "42\\n", "", code=0, timed_out=False)`.

    Attributes:
        output: Beginning of its standard output, up to the limit.
        last: The last 4 kB of its standard output.
        errors: The last 4 kB of its standard error, such as a traceback.
        code: Exit code; 1 after an error of Python, 128 plus the signal's number where a signal ended it.
        timed_out: Whether it was killed because it took longer than its limit; then `code` is 137.
    """

    output: str
    last: str
    errors: str
    code: int
    timed_out: bool

    @property
    def succeeded(self) -> bool:
        """Whether it came to its end in time, with code 0."""
        return self.code == 0 and not self.timed_out


class Sandbox:
    """Runs Python programs, each in namespaces of its own (Linux, where a user may make namespaces).

        Sandbox(Limits(timeout_s=5)).run("print(2 * int(input()))", given="21").output  # "42\\n"

    A program can read the files of the system, of Python and of installed packages. The files that it writes are in
    memory, 64 MB at most, and gone when it ends; so is every process that it started. It has 64 processes at most where
    the run is not root's. The limit of memory is for each process: their sum, and memory from `memfd_create`, are not
    limited until the program's time is over.

    Args:
        limits: Limits of one program. `timeout_s` counts from its start; CPU time is limited to about as much, for each
            process.

    Raises:
        UserError: This system cannot isolate a program.
    """

    def __init__(self, limits: Limits) -> None:
        if problem := why_not():
            raise UserError(
                f"code cannot be isolated here ({problem}), and running what a model writes without that would be"
                " careless; allow user namespaces (user.max_user_namespaces, and unprivileged_userns_clone or"
                " AppArmor's setting of it where there is one), or score in another way"
            )
        self._limits = limits

    def run(self, program: str, given: str = "", keep_kb: int | None = None) -> SandboxResult:
        """Run a program to its end or its limit of time; its errors and its output are in the result.

        Args:
            program: Source text in Python.
            given: Standard input of the program.
            keep_kb: kB of its output that are stored from the beginning; None for `output_kb` of the limits.
        """
        return _run(program, given, self._limits, keep_kb or self._limits.output_kb)


@cache
def why_not() -> str:
    """Reason why this system cannot isolate a program; empty where it can."""
    if sys.platform != "linux":
        return f"namespaces are Linux's, and this is {sys.platform}"
    ran = _run("print('isolated')", "", Limits(timeout_s=30), 1)
    return "" if ran.succeeded and ran.output == "isolated\n" else " ".join(ran.errors.split()) or f"code {ran.code}"


def _run(program: str, given: str, limits: Limits, keep_kb: int) -> SandboxResult:
    memory = {} if limits.memory_mb is None else {"RLIMIT_AS": limits.memory_mb * MB}
    settings = {
        "parent": os.getpid(),
        "readable": sorted({"/usr", "/lib", "/lib64", "/bin", sys.prefix, sys.base_prefix, *LINKER}),
        "disk_bytes": DISK_MB * MB,
        "limits": {
            "RLIMIT_CPU": math.ceil(limits.timeout_s) + 1,
            "RLIMIT_FSIZE": limits.file_mb * MB,
            "RLIMIT_NPROC": PROCESSES,
            **memory,
        },
    }
    text, read = _in_memory(program), _in_memory(given)
    boot = f"import os; exec(compile(os.fdopen({text}, encoding='utf-8').read(), 'program', 'exec'))"
    process = subprocess.Popen(
        [sys.executable, "-I", str(ISOLATE), json.dumps(settings), sys.executable, "-I", "-u", "-c", boot],
        stdin=read,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(text,),
        start_new_session=True,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},  # no secrets of this process
    )
    os.close(text)
    os.close(read)
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = Output(process.stdout, last=LAST, first=keep_kb << 10), Output(process.stderr, last=LAST)
    timed_out = False
    try:
        code = process.wait(limits.timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()  # and with it all that the program has started: its first process dies with this one
        process.wait()
        timed_out, code = True, 128 + 9
    output.join()
    errors.join()
    return SandboxResult(output.first_text, output.last_text, errors.last_text, code, timed_out)


def _in_memory(text: str) -> int:
    """File descriptor, at position 0, of a file in memory with a text; a program may be too long for an argument."""
    file = os.memfd_create("rlflow-text")
    with os.fdopen(os.dup(file), "wb") as written:
        written.write(text.encode("utf-8", "replace"))
    os.lseek(file, 0, os.SEEK_SET)
    return file
