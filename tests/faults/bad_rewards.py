"""Rewards with each fault that one may have, for the response `x`; 1 for any other. Imported by workers."""

import os
import re
import subprocess
import sys
import time


def _for_x(what):
    return lambda response, row: what() if response == "x" else 1.0


def _children():
    for _ in range(20):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    time.sleep(600)


def _prints():
    for _ in range(100):
        print("y" * 2**20)
    raise ValueError("after 100 MB")


def _raises_long():
    raise ValueError("after megabytes: " + "y" * 50_000_000)


raises = _for_x(lambda: {}["solution"])
raises_long = _for_x(_raises_long)
sleeps = _for_x(lambda: time.sleep(600))
spins_in_c = _for_x(lambda: re.match(r"(a+)+$", "a" * 64 + "b"))
nan = _for_x(lambda: float("nan"))
infinite = _for_x(lambda: float("inf"))
none = _for_x(lambda: None)
text = _for_x(lambda: "1")
several = _for_x(lambda: [1.0, 2.0])
exits = _for_x(lambda: sys.exit(0))
leaves = _for_x(lambda: os._exit(0))
takes_memory = _for_x(lambda: len(bytearray(4 * 2**30)))
starts_children = _for_x(_children)
prints = _for_x(_prints)
