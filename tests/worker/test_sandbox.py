"""Programs that try to get out, where the system has namespaces. RLFLOW_HAS_NAMESPACES=1 says that it must."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlflow.worker import Limits, Sandbox, Worker, WorkerTimeout
from rlflow.worker.isolate import CANNOT
from rlflow.worker.sandbox import ISOLATE, why_not

if os.environ.get("RLFLOW_HAS_NAMESPACES") == "1":
    assert not why_not(), why_not()
pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"programs cannot be isolated here: {why_not()}")

LIMITS = Limits(timeout_s=20, memory_mb=512, file_mb=8, output_kb=4)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(LIMITS)


def test_a_program_reads_its_input_and_prints(sandbox: Sandbox) -> None:
    ran = sandbox.run("import sys, math; print(sys.stdin.read()[::-1], math.floor(2.5))", "abc")
    assert (ran.output, ran.code, ran.succeeded) == ("cba 2\n", 0, True)


def test_a_program_that_fails_says_why(sandbox: Sandbox) -> None:
    ran = sandbox.run("raise ValueError('no')")
    assert (ran.code, ran.succeeded) == (1, False)
    assert "ValueError: no" in ran.errors
    assert not ran.output


LIBC = "__import__('ctypes').CDLL(None)"
REACHING_OUT = [
    "open('/etc/passwd').read()",
    "open('/proc/1/root/etc/passwd').read()",
    "os.listdir('/home')",
    "open('/usr/bin/rlflow_was_here', 'w')",
    "open(sys.prefix + '/rlflow_was_here', 'w')",
    "os.setuid(12345)",
    "os.mknod('/tmp/disk', 0o060600, os.makedev(8, 0))",
    "socket.create_connection(('127.0.0.1', 1), 1)",
    "socket.getaddrinfo('example.org', 80)",
    "bytearray(1 << 30)",
    "open('/tmp/much', 'wb').write(bytes(100 << 20))",
    f"1 / (1 + {LIBC}.unshare(0x10000000))",  # -1 where it fails
    f"1 / (1 + {LIBC}.mount(b'none', b'/tmp', b'tmpfs', 0, None))",
    f"1 / (1 + {LIBC}.umount2(b'/usr', 2))",
    f"1 / (1 + {LIBC}.chroot(b'/usr'))",
]


def test_a_program_that_reaches_outside_the_sandbox_fails(sandbox: Sandbox) -> None:
    """All of it in one program, which tells what it could do."""
    program = (
        "import os, socket, sys\n"
        f"for attempt in {REACHING_OUT!r}:\n"
        "    try: exec(attempt)\n"
        "    except Exception: continue\n"
        "    print('could:', attempt)\n"
        "print('tried')\n"
    )
    assert sandbox.run(program).output == "tried\n"


def test_neither_files_nor_environment_nor_network_of_this_process_are_seen(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = secrets.token_hex(8)
    (tmp_path / "secret").write_text(word)
    monkeypatch.setenv("API_KEY", word)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.settimeout(0.1)
        program = (
            "import os, socket\n"
            "print(dict(os.environ), os.listdir('/'), os.listdir('/tmp'))\n"
            f"try: print(open({str(tmp_path / 'secret')!r}).read())\n"
            "except OSError as error: print('no file')\n"
            f"try: socket.create_connection(('127.0.0.1', {port}), 1)\n"
            "except OSError: print('no network')\n"
        )
        ran = sandbox.run(program)
        with pytest.raises(TimeoutError):
            server.accept()
    assert ran.code == 0
    assert word not in ran.output
    assert ran.output.endswith("no file\nno network\n")


def test_no_process_of_others_is_seen_and_none_is_left(sandbox: Sandbox) -> None:
    program = (
        "import os\n"
        "print(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    import time; time.sleep(600)\n"
    )
    began = time.monotonic()
    ran = sandbox.run(program)
    assert ran.code == 0
    assert ran.output == "[1]\n" or "FileNotFoundError" in ran.errors
    assert time.monotonic() - began < 15, "the child that slept ended with its parent"


@pytest.mark.parametrize("program", ["while True: pass", "import os\nfor _ in range(6): os.fork()\nwhile True: pass"])
def test_what_takes_too_long_is_killed(program: str) -> None:
    ran = Sandbox(Limits(timeout_s=1.0)).run(program)
    assert (ran.timed_out, ran.succeeded) == (True, False)


def test_output_beyond_the_limit_is_dropped(sandbox: Sandbox) -> None:
    ran = sandbox.run("print('a' * (100 << 20))")
    assert (ran.code, ran.output, ran.last) == (0, "a" * (4 << 10), "a" * ((4 << 10) - 1) + "\n")


def test_a_program_ends_with_the_worker_that_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    with contextlib.closing(Worker(Limits(timeout_s=3, memory_mb=None))) as worker, pytest.raises(WorkerTimeout):
        worker.function("harmful_code.run_a_program_without_end")
    until = time.monotonic() + 10
    while (left := _without_end()) and time.monotonic() < until:
        time.sleep(0.01)
    assert left == []


def test_a_program_in_a_worker_of_less_memory_has_the_worker_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    with contextlib.closing(Worker(Limits(memory_mb=2048))) as worker:
        assert worker.function("harmful_code.run_a_program", 8192) == "1\n"


def _without_end() -> list[int]:
    """Processes of `run_a_program_without_end`: the one that waits, by its settings, and the one that runs."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "123458" in " ".join(process.cmdline()) or process.rlimit(psutil.RLIMIT_CPU)[0] == 123458:
                found.append(process.pid)
    return found


def test_nothing_runs_where_the_parent_was_gone_before() -> None:
    settings = {"parent": 0, "readable": [sys.prefix, "/usr", "/lib", "/lib64"], "disk_bytes": 1 << 20, "limits": {}}
    command = [sys.executable, "-I", str(ISOLATE), json.dumps(settings), sys.executable, "-I", "-c", "print('runs')"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (CANNOT, "", "")
