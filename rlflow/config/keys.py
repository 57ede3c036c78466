"""Translates the keys of a merged config to those that the user wrote, for errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlflow.config.command_line import Text
from rlflow.dag.node import GraphError
from rlflow.errors import SETTING, UserError

CLASS, ARGUMENTS = "class_path", "init_args"


class WrittenKeys:
    """Keys as the user wrote them: with or without `init_args` in between, and `class_path` at their end.

    Example:
        `module.init_args.group_size` is `module.group_size` where the option `--module.group_size 8` gave it last, and
        `strategy.class_path` is `strategy` where the config has `strategy: fsdp`.

    Args:
        layers: The trees of the configs and options; the last one wins.
        tree: All layers merged, in which some classes are written by `class_path` and `init_args`.
    """

    def __init__(self, layers: Sequence[Mapping[str, Any]], tree: Mapping[str, Any]) -> None:
        self._trees = layers[::-1]
        self._tree = tree

    def of(self, keys: Sequence[str]) -> tuple[str, ...]:
        """The keys as the last layer that has all of them writes them, else the layer that has the most of them."""
        _, keys = _along(self._tree, keys)
        found = [_along(tree, keys) for tree in self._trees]
        return max(found, key=lambda each: each[0], default=(0, tuple(keys)))[1]

    def key(self, keys: Sequence[str]) -> str:
        """The same keys as one dotted text: `module.group_size`."""
        return ".".join(self.of(keys))

    @contextmanager
    def in_errors(self, config: Mapping[str, Any]) -> Iterator[None]:
        """A context in which the message of a `UserError` gets the keys that the user wrote.

        "`module.group_size` is 1" becomes "`module.init_args.group_size` is 1" if a config has it so. Names of graph
        nodes, and names that are not keys of the config, stay.

        Args:
            config: The config with all defaults, and all classes written as `class_path` and `init_args`.
        """
        try:
            yield
        except GraphError:
            raise  # its names are nodes
        except UserError as error:
            if error.args and isinstance(error.args[0], str):
                error.args = (SETTING.sub(lambda match: self._key_in(match, config), error.args[0]), *error.args[1:])
            raise

    def _key_in(self, match: re.Match[str], config: Mapping[str, Any]) -> str:
        keys = _whole(match.group(1).split("."), config)
        return match.group(0) if keys is None else f"`{self.key(keys)}`"


def _along(tree: Any, keys: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """Number of the keys that a tree has, and the keys without the `class_path` and `init_args` that it leaves out."""
    found: list[str] = []
    for count, key in enumerate(keys):
        if isinstance(tree, Mapping) and key in tree:
            tree = tree[key]
        elif isinstance(tree, list) and key.isdigit() and int(key) < len(tree):
            tree = tree[int(key)]
        elif _leaves_out(tree, key):
            continue
        else:
            return count, (*found, *keys[count:])
        found.append(key)
    return len(keys), tuple(found)


def _leaves_out(tree: Any, key: str) -> bool:
    """Whether a tree is the arguments of an implied class, or a text that stands for a class."""
    if isinstance(tree, Mapping):
        return key == ARGUMENTS and CLASS not in tree and bool(tree)
    return key in (CLASS, ARGUMENTS) and isinstance(tree, str | Text)


def _whole(keys: Sequence[str], config: Any) -> tuple[str, ...] | None:
    """The keys with `init_args` where the config has it in between; None where it has no such key."""
    if len(keys) < 2:
        return None
    found: list[str] = []
    for key in keys:
        if isinstance(config, Mapping) and key not in config and ARGUMENTS in config:
            found.append(ARGUMENTS)
            config = config[ARGUMENTS]
        if not isinstance(config, Mapping) or key not in config:
            return None
        found.append(key)
        config = config[key]
    return tuple(found)
