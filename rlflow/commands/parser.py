"""The command line of every command: options from the signature of a function, and errors of one line."""

from __future__ import annotations

import inspect
from argparse import SUPPRESS, Action
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, get_args, get_origin

from docstring_parser import parse
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from rlflow.config.arguments import Argument, Group
from rlflow.config.checking import mistakes_of
from rlflow.config.command_line import Text, options
from rlflow.config.merging import written_whole
from rlflow.errors import UserError, one_line
from rlflow.process.status import CommandExit


class OneLineParser(ArgumentParser):
    """A parser that reports a wrong command in one line, without its usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise what is wrong."""
        raise UserError(one_line(ValueError(message))) from ex

    def exit(self, code: int = 0, message: str | None = None) -> NoReturn:
        """End the command: help was printed."""
        raise CommandExit(code)


def call(command: Callable[..., None], arguments: Sequence[str]) -> None:
    """Call the function of a command that takes no config with the values of a command line.

    Args:
        command: Named as the command; see `add_parameters`. The `Example:` of its docstring ends its help.
        arguments: The command line after the command's name.

    Raises:
        UserError: An argument is wrong, or one is missing.
    """
    described, prog = parse(command.__doc__ or ""), f"rlflow {command.__name__}"
    parser = OneLineParser(
        prog=prog,
        description=described.short_description,
        epilog="".join(f"example: {each.description}" for each in described.examples),
        formatter_class=_ScreenFormatter,
        allow_abbrev=False,
    )
    add_parameters(parser, command)
    parser.usage = f"{prog}{_usage(parser)}"
    parsed = parsed_options(parser, arguments)
    bound = inspect.signature(command).bind_partial()
    bound.arguments.update(vars(parsed))
    command(*bound.args, **bound.kwargs)


class _ScreenFormatter(DefaultHelpFormatter):
    """Help that fits a screen: without types, and with defaults that say more than "off"."""

    def _get_help_string(self, action: Action) -> str:
        if action.required and action.option_strings:
            return f"{action.help} (required)"
        has_default = action.default not in (None, False, SUPPRESS) and action.option_strings
        return f"{action.help} (default: {action.default})" if has_default else action.help or ""


def _usage(parser: OneLineParser) -> str:
    """The arguments and required options of a command by name, and whether it takes others."""
    needed, others = "", ""
    for action in parser._actions:
        if not action.option_strings:
            needed += f" [{action.dest} ...]" if action.nargs == "*" else f" {action.dest}"
        elif action.required:
            needed += f" {action.option_strings[0]} {action.dest.upper()}"
        elif action.dest != "help":
            others = " [--OPTION VALUE ...]"
    return needed + others


def add_parameters(parser: OneLineParser, command: Callable[..., Any], skip: int = 0) -> None:
    """Add a function's parameters to a parser, described as in the function's docstring.

    Args:
        parser: Parser of the command.
        command: The command. Its positional-only parameters are given in their order, the others as options; a `bool`
            is a flag, which may have a value; `*runs` takes any number of further arguments. So
            `def samples(run_dir: Path, /, step: int | None = None, last: bool = False)` is called by
            `rlflow samples RUN_DIR --step 3` and by `rlflow samples RUN_DIR --last`.
        skip: Number of its first parameters that are not arguments of the command line.
    """
    described = {each.arg_name: each.description for each in parse(command.__doc__ or "").params}
    for each in [*inspect.signature(command, eval_str=True).parameters.values()][skip:]:
        is_option = each.kind not in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL)
        form: dict[str, Any] = {"type": each.annotation}
        for hint in (each.annotation, *get_args(each.annotation)):
            if is_option and get_origin(hint) is Literal:
                form["metavar"] = "{" + ",".join(get_args(hint)) + "}"
        if each.annotation is bool:
            form |= {"nargs": "?", "const": True, "default": False}
        elif each.kind is each.VAR_POSITIONAL:
            form["nargs"] = "*"
        elif each.default is not each.empty:
            form["default"] = each.default
        elif is_option:
            form["required"] = True
        parser.add_argument(f"--{each.name}" if is_option else each.name, help=described.get(each.name), **form)


@contextmanager
def writing(option: str) -> Iterator[None]:
    """A context in which a command writes its output, to a path that an option can change.

    Raises:
        UserError: It cannot be written there.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or 'the output'} cannot be written ({error.strerror}); give another place by `--{option}`"
        ) from error


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
        shape = Group({name: Argument(each.hint) for name, each in keys_of(parser).items()})
        given = {name: Text(text) for name, text in options(arguments[start:]) if text is not None}
        tree = written_whole(given, shape)
        for mistake in mistakes_of(tree, shape):
            raise mistake.error((f"--{mistake.keys[0]}", *mistake.keys[1:])) from error
        raise
