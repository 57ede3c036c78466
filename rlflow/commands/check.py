"""`rlflow check`: finds what changes the gradient of a config's algorithm though it should not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow.commands.configuration import Configured, call_configured
from rlflow.errors import UserError, one_line
from rlflow.process.status import CommandExit
from rlflow.testing.check import Report, examine

WRONG_CODE = 1


def check(configured: Configured, /, depends_on: list[str] | None = None, parts: list[str] | None = None) -> Report:
    """Find what changes an algorithm's gradient though it should not: micro-batches, ranks, padding, order.

    Args:
        configured: The algorithm. Small seeded models, recorded rows and recorded rewards take the place of its own.
        depends_on: Names of lines of the table: changes that the gradient may depend on, such as `[order]`.
        parts: Names of the reward's parts, for an algorithm that reads them from a function's dict.
    """
    row, note = _first_row(configured)
    images = configured.data.images is not None
    report = examine(configured.module, depends_on or (), row, parts or (), images)
    print("\n".join([str(report), *note]))
    return report


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow check`; exit with 1 if something is wrong."""
    if call_configured(check, arguments).wrong:
        raise CommandExit(WRONG_CODE)


def _first_row(configured: Configured) -> tuple[dict[str, Any], list[str]]:
    """The first row of the config's data, whose columns nodes may read; a line where it cannot be read here."""
    try:
        return configured.data.train.read([0])[0], []
    except (UserError, ImportError, OSError) as error:
        return {}, [f"the recorded rows have no columns of `data.train`, which cannot be read here: {one_line(error)}"]
