"""What was found of one thing: whether it works, whether this machine needs it, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        what: Was looked at, with what was found of it.
        state: `missing` is what is not there; `broken` what is there and does not work.
        mend: How it is mended, in a few words; empty where it is ok.
        needed: Whether runs on this machine need it.
    """

    what: str
    state: State = "ok"
    mend: str = ""
    needed: bool = True

    @property
    def fails(self) -> bool:
        """Whether the machine is not ready for this. What is there and broken is in the way, needed or not."""
        return self.state == "broken" or (self.state == "missing" and self.needed)

    def __str__(self) -> str:
        mend = f"; {self.mend}" if self.mend else ""
        return f"{self.state:<8} {self.what}{mend}{'' if self.needed or self.state == 'ok' else ' (not needed here)'}"


@dataclass(frozen=True)
class Machine:
    """What the machine is looked at for.

    Attributes:
        gpu: Whether runs use its GPUs.
        nodes: Machines of a run.
    """

    gpu: bool
    nodes: int = 1


def at_least(what: str, found: float, least: float, mend: str, needed: bool = True) -> Finding:
    """Of a number that must not be smaller."""
    return Finding(what) if found >= least else Finding(what, "missing", mend, needed)
