"""Things that a user's code may do, in a worker. It imports the standard library alone."""

import asyncio
import os
import subprocess
import sys
import time
from typing import Any


def add(a: float, b: float) -> float:
    return a + b


async def add_later(a: float, b: float) -> float:
    await asyncio.sleep(0.001)
    return a + b


def spin() -> None:
    while True:
        pass


def spin_in_c() -> None:
    sum(range(1 << 60))


def own_id() -> int:
    return os.getpid()


def leave() -> None:
    print("so long")
    os._exit(0)


def code_of_a_fork(does: str) -> int:
    if (pid := os.fork()) == 0:
        exec(does)
        return -1
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def give_up() -> None:
    exit(0)


def complain() -> None:
    raise ValueError("of two\nlines")


def talk(lines: int) -> int:
    for _ in range(lines):
        print("a" * 99_999)
    return lines


def take_memory() -> int:
    return len(bytearray(64 << 30))


def write_much(path: str) -> None:
    with open(path, "wb") as file:
        for _ in range(1 << 10):
            file.write(bytes(1 << 20))


def start_others(pids: str) -> None:
    """One that leaves the session, one of it, and one that leaves it with another environment."""
    unmarked = subprocess.Popen(
        ["sleep", "60"], env={}, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    with open(pids, "a") as file:
        file.write(f"{unmarked.pid}\n")
    for leaves in (True, False):
        if os.fork() == 0:
            if leaves:
                os.setsid()
            with open(pids, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(60)
            sys.exit()
    time.sleep(60)


def leave_an_orphan(seconds: float) -> int:
    """Start a process that leaves the session, by one that ends; its id."""
    reads, writes = os.pipe()
    if (first := os.fork()) == 0:
        os.setsid()
        if (pid := os.fork()) == 0:
            os.closerange(0, 1 << 10)
            time.sleep(seconds)
            os._exit(0)
        os.write(writes, f"{pid}\n".encode())
        os._exit(0)
    os.waitpid(first, 0)
    return int(os.read(reads, 20))


def leave_a_printer() -> int:
    """An orphan that has nothing by which it is known to be the worker's, and may print; its id."""
    command = ["sh", "-c", "sleep 60 >&2 & echo $!"]
    return int(subprocess.run(command, env={}, start_new_session=True, stdout=subprocess.PIPE, check=True).stdout)


def start_a_large_one(pids: str) -> None:
    """One that leaves the session and its output, with memory that the kernel takes a tenth of a second to free."""
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, 3)
        memory = bytearray(b"x") * (1 << 30)
        with open(pids, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(60)
        sys.exit(len(memory))
    time.sleep(60)


def multiply() -> None:
    """64 processes, in sessions of their own, that spin; more would disturb other tests."""
    for _ in range(6):
        os.fork()
        os.setsid() if os.getpid() != os.getsid(0) else None
    while True:
        pass


def run_a_program_without_end() -> None:
    """Run it in a sandbox; it sleeps 123457 seconds, by which its processes are known."""
    from rlflow.worker import Limits, Sandbox

    Sandbox(Limits(timeout_s=123457)).run("while True: pass")


def run_a_program(memory_mb: int) -> str:
    from rlflow.worker import Limits, Sandbox

    return Sandbox(Limits(timeout_s=20, memory_mb=memory_mb)).run("print(1)").output


def what_is_no_json() -> Any:
    return {1, 2}


def close_the_pipes() -> None:
    os.closerange(3, 1 << 16)  # whatever their numbers
    time.sleep(60)


def sockets_of_a_program() -> int:
    """Number of sockets of a program that inherits all it can."""
    listed = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False)
    return listed.stdout.count("socket:")


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def step(self, by: int = 1) -> int:
        self.count += by
        return self.count
