"""A script for the supervisor's tests, which name what happens to the supervised process."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

from rlflow.process import status, supervisor
from rlflow.process.supervisor import supervise


def main(happening: str) -> None:
    supervisor.HELD_S = 2.0
    supervisor.GRACE_S = supervisor.LEAVING_S = 0.5
    if happening == "is stopped":
        supervisor.UNKNOWN_S = 1.0
    supervise()
    print(f"process {os.getpid()}", flush=True)
    status.report(3, "step 7, run   rewards")
    received: list[str] = []
    match happening:
        case "comes to its end":
            status.end()
        case "leaves by libc":
            ctypes.CDLL(None)._exit(0)
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "is killed after a save":
            status.saved(5)
            os.kill(os.getpid(), signal.SIGKILL)
        case "exits with 2 after a word of its own":
            status.end()
            sys.exit(2)
        case "is held by C at its end":
            status.end()
            ctypes.PyDLL(None).sleep(20)
        case "is held by C at the end of a failure":
            status.end(2)
            ctypes.PyDLL(None).sleep(20)
        case "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "waits for a rank that does something else":
            other = status.board()[1]
            other.write(1, "step 7, run rewards")
            other.process, other.limit_s, other.heartbeat = os.getpid(), 60.0, time.monotonic() + 60
            status.failed()
            time.sleep(60)
        case "leaves a program":
            nowhere = subprocess.DEVNULL
            print(subprocess.Popen(["sleep", "60"], stdout=nowhere, stderr=nowhere).pid, flush=True)
            status.end()
        case "takes long to leave":
            status.end()
            time.sleep(6)
        case "handles signals":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, lambda number, _: received.append(signal.Signals(number).name))
            print("waits", flush=True)
            deadline, printed = time.monotonic() + 300, 0
            while printed < 3 and time.monotonic() < deadline:
                time.sleep(0.02)
                if len(received) > printed:
                    print(received[printed], flush=True)
                    printed += 1
            status.end()
        case "counts signals":
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, lambda number, _: received.append(signal.Signals(number).name))
            print("waits", flush=True)
            deadline = time.monotonic() + 300
            while not received and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(1)  # a second one would come by then
            print(" ".join(received), flush=True)
            status.end()
        case "waits":
            print("waits", flush=True)
            time.sleep(120)


if __name__ == "__main__":
    main(sys.argv[1])
