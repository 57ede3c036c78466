"""Ranks that were started with other code, config or data are found before step 0; the first difference is told."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from rlflow.databuffer.message import from_message, to_message
from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError
from rlflow.module import RLModule


def facts(module: RLModule, config: str | None, plan: str, **numbers: int | str) -> list[str]:
    """A line for each thing that must be the same on every rank.

    Args:
        module: Whose code counts: the files of its class and of the classes that it is made from.
        config: As it was read; None for a run without one.
        plan: Printed.
        numbers: More, by name.
    """
    files = {sys.modules[cls.__module__].__dict__.get("__file__") for cls in type(module).__mro__}
    sources = sorted(Path(file) for file in files if file is not None)
    return [
        *(f"{name}: {value}" for name, value in numbers.items()),
        *(f"code of {file.name}: {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}" for file in sources),
        *(f"config: {line}" for line in (config or "").splitlines()),
        *(f"plan: {line}" for line in plan.splitlines()),
    ]


def agree(transport: Transport, mine: list[str]) -> None:
    """Return when every rank has the same facts; a collective of all ranks.

    Raises:
        UserError: One has others; it is named, with the first line that differs from rank 0's.
    """
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    digests = [from_message(each) for each in transport.all_gather(to_message(digest))]
    others = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if not others:
        return
    of_all = transport.all_gather_ragged(to_message("\n".join(mine).encode()))
    first, theirs = (from_message(of_all[rank]).decode().splitlines() for rank in (0, others[0]))
    here, there = next(
        ((a, b) for a, b in zip(first, theirs, strict=False) if a != b),
        (_after(first, len(theirs)), _after(theirs, len(first))),
    )
    raise UserError(
        f"rank {others[0]} was started for another run than rank 0: `{there}` there and `{here}` here; start every rank"
        " with the same config, code and data"
    )


def _after(lines: list[str], count: int) -> str:
    return lines[count] if count < len(lines) else "nothing more"
