"""The table of a proof: a row for each run, and the runs that were left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from benchmarks.unchanged.cases import VLLM, Case
from benchmarks.unchanged.comparison import Difference, compared
from benchmarks.unchanged.record import Values


@dataclass(frozen=True)
class Row:
    """A case, the number of values that were compared, and the differences.

    Attributes:
        case: The case.
        values: Number of values compared; 0 where a run is missing.
        differences: Differences, in order.
        missing: `before` and `now`, where a run is not there.
    """

    case: Case
    values: int = 0
    differences: tuple[Difference, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether both runs are there and no value differs."""
        return not self.differences and self.values > 0

    @property
    def verdict(self) -> str:
        """Result in a few words."""
        if self.missing:
            return f"missing: {', '.join(self.missing)}"
        if self.differences:
            return f"{len(self.differences)} differ; first {self.differences[0]}"
        return "equal" if self.values else "nothing to compare"


def row(case: Case, base: Values | None, present: Values | None, allowed: Collection[str]) -> Row:
    """Compare a case's runs.

    Args:
        case: The case.
        base: Values of the run before; None where it is not there.
        present: Values of the run now; None where it is not there.
        allowed: Names that one side may lack.
    """
    if base is None or present is None:
        return Row(case, missing=("before",) * (base is None) + ("now",) * (present is None))
    values, differences = compared(base, present, allowed)
    return Row(case, values, tuple(differences))


def table(rows: Iterable[Row]) -> list[str]:
    """Markdown."""
    lines = ["| Config | Ranks | Engine | Values | Result |", "|---|---|---|---|---|"]
    for each in rows:
        case = each.case
        engine = "vLLM" if case.engine == VLLM else "transformers"
        lines.append(f"| {case.config} | {case.ranks} | {engine} | {each.values} | {each.verdict} |")
    return lines


def summary(rows: Collection[Row]) -> str:
    """One line."""
    equal, missing = sum(each.equal for each in rows), sum(bool(each.missing) for each in rows)
    values = sum(each.values for each in rows)
    configs = len({each.case.config for each in rows})
    return (
        f"{equal} of {len(rows)} runs of {configs} configs are equal in {values} values; "
        f"{len(rows) - equal - missing} differ, {missing} are missing"
    )
