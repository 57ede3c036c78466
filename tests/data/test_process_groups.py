"""Process groups: how many connections a rank holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "connections.py"


def sockets(ranks: int, *how: str) -> int:
    """Those of rank 0 once all ranks have reduced a number."""
    command = [sys.executable, str(SCRIPT), str(ranks), *how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)


def test_a_rank_connects_to_those_that_it_exchanges_with() -> None:
    few, many = sockets(4, "when-used"), sockets(12, "when-used")
    # A reduction goes around a ring, so 8 more ranks are no more neighbours; else each of them is a connection more.
    # One that a neighbour is about to open or to close may count or not.
    assert many <= few + 2
    assert sockets(12) >= many + 6
