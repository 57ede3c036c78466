"""Prompts as a template writes them: the dataset's own, and columns of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import Any

from rlflow.errors import UserError

PROMPT = "prompt"  # what a template calls the dataset's own prompt; other names are columns


class Template(Formatter):
    """A text with places in braces: `{prompt} The answer is {metadata.answer}.`

    Args:
        text: The template; `{{` and `}}` stand for braces.

    Raises:
        UserError: It cannot be read, or a place has no name.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        try:
            names = [name for _, name, _, _ in self.parse(text) if name is not None]
        except ValueError as error:  # such as a single brace
            raise UserError(
                f"the prompt template {text!r} cannot be read ({error}); write `{{{{` for a brace"
            ) from error
        if not all(names):
            raise UserError(f"the prompt template {text!r} has a place without a name; name a column in it")

    def written(self, prompt: str, column: Callable[[str], Any]) -> str:
        """The text of one row.

        Args:
            prompt: The dataset's own.
            column: The column of a name, or dotted path, of the row.
        """
        return self.vformat(self._text, (), {PROMPT: prompt, _COLUMN: column})

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        """A place's value; dots step into a column, as in `data.prompt`."""
        value = kwargs[PROMPT] if field_name == PROMPT else kwargs[_COLUMN](field_name)
        return value, field_name

    def check_unused_args(self, used_args: Any, args: Any, kwargs: Any) -> None:
        """A template need not say the prompt."""


_COLUMN = "column of a row"  # no name in a template
