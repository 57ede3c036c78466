"""Prompts as a template writes them: the dataset's own, and columns of its rows."""

from __future__ import annotations

from collections.abc import Callable
from string import Formatter
from typing import Any

from rlflow.errors import UserError

PROMPT = "prompt"  # what a template calls the dataset's own prompt; other names are columns


class Template:
    """A text with places in braces: `{prompt} The answer is {metadata.answer}.`

    Args:
        text: The template; `{{` and `}}` stand for braces.

    Raises:
        UserError: It cannot be read, or a place has no name.
    """

    def __init__(self, text: str) -> None:
        try:
            self._parts = list(Formatter().parse(text))
        except ValueError as error:  # such as a single brace
            raise UserError(
                f"the prompt template {text!r} cannot be read ({error}); write `{{{{` for a brace"
            ) from error
        if any(name == "" for _, name, _, _ in self._parts):
            raise UserError(f"the prompt template {text!r} has a place without a name; name a column in it")

    def written(self, prompt: str, column: Callable[[str], Any]) -> str:
        """The text of one row.

        Args:
            prompt: The dataset's own.
            column: The column of a name, or dotted path, of the row.
        """
        text = ""
        for before, name, form, conversion in self._parts:
            text += before
            if name is not None:
                value = Formatter().convert_field(prompt if name == PROMPT else column(name), conversion)
                text += format(value, form or "")
        return text
