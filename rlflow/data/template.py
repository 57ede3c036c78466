"""Prompts as a template writes them: the dataset's own, and columns of its rows."""

from __future__ import annotations

from collections.abc import Callable
from string import Formatter
from typing import Any

from rlflow.errors import UserError

PROMPT = "prompt"  # what a template calls the dataset's own prompt; other names are columns


def write_template(template: str, prompt: str, column: Callable[[str], Any]) -> str:
    """The text that a template such as `{prompt} The answer is {metadata.answer}.` writes from one row.

    Args:
        template: A text with places in braces; `{{` and `}}` give braces.
        prompt: The dataset's own.
        column: The column of a name, or dotted path, of the row.

    Raises:
        UserError: The template cannot be read, or a place has no name.
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
            value = Formatter().convert_field(prompt if name == PROMPT else column(name), conversion)
            text += format(value, form or "")
    return text
