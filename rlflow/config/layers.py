"""What a command line says, layer by layer: each config and each option once, as YAML with its lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from rlflow.config.reading import composed, constructed, read
from rlflow.errors import UserError, one_line
from rlflow.loggers.secrets import arguments_without_secrets, without_secrets
from rlflow.no_file import no_file

CONFIG = "config"


@dataclass(frozen=True)
class Text:
    """The value of an option: a text, or what it is as YAML, whichever fits the option's type."""

    text: str

    @cached_property
    def value(self) -> Any:
        """As YAML; the text where it is none."""
        try:
            return read(self.text)
        except UserError:
            return self.text


class Appended(list[Any]):
    """Entries that an option adds to those of a list: `--callbacks+ NAME`."""


@dataclass(frozen=True)
class Layer:
    """A config or an option.

    Attributes:
        source: The file, or the option as it is written.
        tree: Of keys to values; values of options are `Text`.
        node: The whole file with its lines; None for an option.
    """

    source: str
    tree: dict[str, Any]
    node: yaml.Node | None = None


def layers(arguments: Sequence[str], alone: Mapping[str, Any] = MappingProxyType({})) -> list[Layer]:
    """The configs and options of a command line, in order.

    Args:
        arguments: `--key value` and `--key=value`; `--config FILE` for a config.
        alone: Options that may stand without a value, and the value that this means.

    Raises:
        UserError: An argument is no option, lacks its value, or a config cannot be read.
    """
    found = []
    for name, text in options(arguments):
        if text is None and name not in alone:
            raise UserError(f"`--{name}` has no value; write `--{name} VALUE`")
        if name == CONFIG:
            found.append(_file(text or ""))
            continue
        value: Any = alone[name] if text is None else Text(text)
        if name.endswith("+"):
            value = Appended([value])
        for key in reversed(name.removesuffix("+").split(".")):
            value = {key: value}
        found.append(Layer(f"--{name}", value))
    return found


def options(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Names of options and their values, `--a.b 3` and `--a.b=3` alike; None for an option without a value.

    Raises:
        UserError: An argument is neither.
    """
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            given = f"{arguments_without_secrets([argument])[0]:.80}"
            raise UserError(f"`{given}` is neither an option nor a value of one; an option is `--key value`")
        name, equals, value = argument[2:].partition("=")
        if equals:
            yield name, value
        else:
            yield name, rest.pop(0) if rest and not rest[0].startswith("--") else None


def _file(path: str) -> Layer:
    """A config.

    Raises:
        UserError: It cannot be read, is not YAML, or holds no keys.
    """
    what = f"`--{CONFIG}` is {path!r:.200}"
    try:
        if not Path(path).is_file():
            raise UserError(f"{what}{no_file(path, 'a YAML file', '.yaml', '.yml')}")
        text = Path(path).read_text(encoding="utf-8")
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{what}, which is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{what}, which cannot be read ({one_line(error)}); check the path") from error
    node = composed(text, what)
    tree = constructed(node, what)
    if tree is not None and not isinstance(tree, dict):
        raise UserError(f"{what}, which holds no `key: value` lines but {without_secrets(tree)!r:.80}; mend it")
    return Layer(path, tree or {}, node)
