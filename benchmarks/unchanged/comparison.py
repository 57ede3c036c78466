"""Compares two records, value by value and bit by bit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from benchmarks.unchanged.record import Value, Values

# Times and bytes of the machine, and which ranks rows take their way over: a plan may change them and no number.
LEFT_OUT = ("time/", "exchange/", "balance/", "memory/")
ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """A value that is another: where it stands, and what both sides have."""

    place: str
    name: str
    base: str
    present: str

    def __str__(self) -> str:
        return f"{self.place}, {self.name}: {self.base} before, {self.present} now"


def compared(base: Values, present: Values, allowed: Collection[str]) -> tuple[int, list[Difference]]:
    """Number of values that were compared, and those that differ, in the base's order.

    Args:
        base: Values of the run before.
        present: Values of the run now.
        allowed: Names that one side may lack.
    """
    number, found = 0, []
    for place in [*base, *(place for place in present if place not in base)]:
        before, now = base.get(place, {}), present.get(place, {})
        for name in [*before, *(name for name in now if name not in before)]:
            lacks = name not in before or name not in now
            if name.startswith(LEFT_OUT) or name.endswith(("_seconds", "_wait")) or (lacks and name in allowed):
                continue
            number += 1
            both = [shown(side[name]) if name in side else ABSENT for side in (before, now)]
            if both[0] != both[1]:
                found.append(Difference(place, name, *both))
    return number, found


def shown(value: Value) -> str:
    """Every bit of a number; two numbers are shown alike only if they are the same one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return repr(value)
    return f"{float(value)!r} ({float(value).hex()})"
