"""Process groups: how many connections a rank holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "connections.py"


def sockets(ranks: int, *how: str) -> int:
    """Those of a rank once all ranks have reduced a number."""
    command = [sys.executable, str(SCRIPT), str(ranks), *how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)


def test_a_rank_connects_to_those_that_it_exchanges_with() -> None:
    # One socket waits for connections. A reduction goes around a ring, so each rank has two neighbours.
    assert sockets(12, "when-used") == 1 + 2
    # Else it is connected to every other.
    assert sockets(12) == 1 + 11
