"""Writes prompts by a template from the dataset's prompt and the columns of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any

from rlflow.dotted_path import column_of
from rlflow.errors import UserError, one_line

PROMPT = "prompt"  # what a template calls the dataset's own prompt; other names are columns


def write_template(template: str, prompt: str | None, row: Mapping[str, Any], place: str) -> str:
    """The text that a template such as `{prompt} The answer is {metadata.answer}.` writes from one row.

    Args:
        template: A text with places in braces; `{{` and `}}` give braces.
        prompt: The dataset's own; None if the row has none.
        row: The row, whose columns the template names; dots step into a column.
        place: Place of the row, for errors.

    Raises:
        UserError: The template cannot be read, a place has no name, or a value is missing, null or not of its format.
    """
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:  # such as a single brace
        raise UserError(
            f"the prompt template {template!r} cannot be read ({error}); write `{{{{` for a brace"
        ) from error
    text = ""
    for before, name, form, conversion in parts:
        text += before
        if name == "":
            raise UserError(f"the prompt template {template!r} has a place without a name; name a column in it")
        if name is not None:
            value = prompt if name == PROMPT and prompt is not None else column_of(row, name, place)
            if value is None:
                raise UserError(
                    f"{place}: column `{name}` is null, and the prompt template {template!r} would write None; fill it"
                    " in, or remove the row"
                )
            try:
                text += format(Formatter().convert_field(value, conversion), form or "")
            except (TypeError, ValueError, OverflowError) as error:  # such as `.2f` of a text, or `!x`
                raise UserError(
                    f"{place}: the prompt template {template!r} cannot write column `{name}`, which is {value!r:.60}"
                    f" ({one_line(error)}); correct the template or the row"
                ) from error
    return text
