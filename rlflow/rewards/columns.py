"""What a reward reads of a row."""

from __future__ import annotations

from typing import Any

from rlflow.dotted_path import value_at
from rlflow.errors import UserError, did_you_mean


def column(row: dict[str, Any], name: str) -> Any:
    """The row's column; dots step into it, as in `metadata.expression`.

    Raises:
        UserError: The row has no such column.
    """
    try:
        return value_at(row, name)
    except KeyError:
        raise UserError(
            f"the reward reads column `{name}`, which the dataset's row lacks; columns found: {', '.join(row)}."
            f"{did_you_mean(name, row)} Mend the row, or remove it: {row!r:.120}"
        ) from None


def filled(row: dict[str, Any], name: str) -> Any:
    """The row's column, as of `column`, which is not null.

    Raises:
        UserError: The row has no such column, or null in it.
    """
    value = column(row, name)
    if value is None:
        raise UserError(
            f"the reward reads column `{name}`, which is null in a row of the dataset, so no response could be right;"
            f" write its value, or remove the row: {row!r:.120}"
        )
    return value
