"""The parser of every command: help as jsonargparse writes it, and one line for what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from rlflow.config.arguments import Argument, Group
from rlflow.config.checking import mistakes_of
from rlflow.config.errors import ConfigError
from rlflow.config.layers import Text, options
from rlflow.config.merging import written_whole
from rlflow.errors import UserError, one_line
from rlflow.process.status import Answered


class OneLineParser(ArgumentParser):
    """Says of a wrong command one line, and does not print its usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise what is wrong."""
        raise UserError(one_line(ValueError(message))) from ex

    def exit(self, code: int = 0, message: str | None = None) -> NoReturn:
        """End the command: help was printed."""
        raise Answered(code)


def keys_of(parser: OneLineParser) -> dict[str, Argument]:
    """A parser's options and arguments with their types, those of groups left out."""
    found = {}
    for action in parser._actions:
        if "." not in action.dest and action.dest not in ("help", "print_config"):
            hint = getattr(action, "_typehint", Any)
            may_be_null = action.default is None and not action.required and hint is not Any
            found[action.dest] = Argument(hint | None if may_be_null else hint, action.required)
    return found


def parsed_options(parser: OneLineParser, arguments: Sequence[str]) -> Namespace:
    """The options of a command without a config.

    Raises:
        UserError: One is wrong, or one is missing; the first is reported.
    """
    try:
        return parser.parse_args(list(arguments))
    except UserError as error:
        named = [argument for argument in arguments if argument.startswith("--")]
        start = arguments.index(named[0]) if named else len(arguments)
        shape = Group({_as_option(parser, name): Argument(each.hint) for name, each in keys_of(parser).items()})
        given = {name: Text(text) for name, text in options(arguments[start:]) if text is not None}
        tree = written_whole(given, shape)
        for mistake in mistakes_of(tree, shape):
            raise ConfigError(mistake.of_option()) from error
        raise


def _as_option(parser: OneLineParser, name: str) -> str:
    """A key as its option is written, perhaps with dashes."""
    dashed = name.replace("_", "-")
    return dashed if f"--{dashed}" in parser._option_string_actions else name
