"""`UserError`, the only error that a user can correct; and `Preempted`, the end of a run that is not an error."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SETTING = re.compile(r"(?<!column )`([a-z_][\w.]*)`")  # in a message; a dataset's column is none
WHOLE, READ, SHOWN = 131_072, 16_384, 4_096  # letters shown of a text, of another library's error, and of a line
MORE = " ... ({:,} letters more)"
_PLACE = "_place_in_config"


@dataclass(frozen=True)
class ConfigPlace:
    """Place in a config of the arguments of an object's constructor.

    Example:
        For the optimizer of `module: {class_path: grpo, init_args: {actor: {model: tiny, optimizer: {lr: 1e-5}}}}`,
        `name` is `optimizer`, and the key of `lr` is `module.init_args.actor.optimizer.lr`.

    Attributes:
        name: The last key of the object's own, such as `optimizer`.
        keys: Keys of its arguments by name, as the user wrote them or would write them: `module.init_args.group_size`.
    """

    name: str
    keys: Mapping[str, str]

    def key(self, name: str) -> str | None:
        """The key of an argument, or of something in it: of `lr` or, as other objects call it, `optimizer.lr`."""
        first, dot, rest = name.partition(".")
        if first in self.keys:
            return f"{self.keys[first]}{dot}{rest}"
        return self.key(rest) if first == self.name and rest else None


class Preempted(BaseException):
    """The run ends because a signal asked its process to end. As `KeyboardInterrupt`, it is not an `Exception`.

    Args:
        number: Number of the signal.
        what: Message: what was saved, and how to continue the run.
        agreed: Whether all ranks end, each for itself.
    """

    GO_ON_FROM_BEFORE = "if anything was saved before, it is still there: continue with `--trainer.ckpt_path last`"

    def __init__(self, number: int, what: str, agreed: bool = False) -> None:
        super().__init__(f"{self.opening(number)} {what}")
        self.agreed = agreed

    @staticmethod
    def opening(number: int) -> str:
        """First words of the line that says why the run ended."""
        return f"ended by {signal.Signals(number).name}:"


# They end the process, and are not a failure of the code that they come through.
ENDING = (Preempted, SystemExit, KeyboardInterrupt)


class UserError(ValueError):
    """A mistake of a user, in one line: what was found, why it cannot work, what to do.

    The command line prints the message without a traceback and exits with 2.

    Settings are in back-ticks: those of an object by the names of its constructor's arguments, if the constructor
    raises the error or `of` is given; any other by its key from the top of a config, such as `trainer.max_steps`, or
    `module.max_response_length`, which is an attribute's name in Python as well. Both are printed as the key that the
    user wrote; without a config they stay as they are.

    Example:
        `UserError("`group_size` is 1; give 2 or more")`, raised in the constructor of the module, reads
        "`module.init_args.group_size` is 1; give 2 or more" where the config has it there.

    Args:
        args: The message.
        of: Object whose settings the message names. If a config gave them, the message names their keys in the config.

    Attributes:
        settings: Keys in the config that the message names: settings of `of`, or of the object whose constructor raised
            it.
    """

    def __init__(self, *args: Any, of: object = None) -> None:
        super().__init__(*args)
        self.settings: tuple[str, ...] = ()
        found = getattr(of, _PLACE, None)
        if found is not None:
            self._name(found)

    def at(self, place: ConfigPlace) -> UserError:
        """The same error, as raised in the constructor of the object there; the innermost place counts."""
        if not self.settings:
            self._name(place)
        return self

    def _name(self, place: ConfigPlace) -> None:
        if not self.args or not isinstance(self.args[0], str):
            return
        keys = []

        def named(match: re.Match[str]) -> str:
            key = place.key(match.group(1))
            if key is None:
                return match.group(0)
            keys.append(key)
            return f"`{key}`"

        self.args = (SETTING.sub(named, self.args[0]), *self.args[1:])
        self.settings = tuple(keys)


def named(text: str, of: object) -> str:
    """A text about an object that names its settings by their keys in the config, where there is one."""
    return str(UserError(text, of=of))


def setting(of: object, name: str, otherwise: str) -> str:
    """An argument of an object's constructor in back-ticks, by its key if a config made the object.

    Args:
        of: The object.
        name: Name of the argument.
        otherwise: Name of the argument in the error if no config made the object.
    """
    found: ConfigPlace | None = getattr(of, _PLACE, None)
    return f"`{otherwise if found is None else found.keys.get(name, otherwise)}`"


def place(of: object, where: ConfigPlace) -> None:
    """Note where an object's arguments are in a config, for errors about it; copies of it have the note too."""
    with suppress(AttributeError):  # it has slots
        object.__setattr__(of, _PLACE, where)


@contextmanager
def about(of: object) -> Iterator[None]:
    """A context for checks of an object's settings: errors name the settings by their keys in the config.

    Args:
        of: Object whose settings the errors name, by the names of its constructor's arguments.
    """
    try:
        yield
    except UserError as error:
        found = getattr(of, _PLACE, None)
        if found is not None:
            error.at(found)
        raise


@contextmanager
def within_node(node_id: str, place: str, rank: int) -> Iterator[None]:
    """A context for a node's body: errors get the node's name, its place in the code, and the rank.

    Args:
        node_id: Name of the node; an error that names it already is not changed.
        place: File and line of the node.
        rank: Rank of this process.
    """
    try:
        yield
    except UserError as error:
        if error.args and isinstance(error.args[0], str) and f"`{node_id}`" not in error.args[0]:
            error.args = (f"{error.args[0]} (rank {rank}, node `{node_id}`, {place})", *error.args[1:])
        raise


def require(module: str, what: str, *extras: str) -> None:
    """Refuse what needs a library that is not installed.

    Args:
        module: Module of the library.
        what: Name of the thing that needs it, for the error.
        extras: Extras of rlflow's installation; each of them installs it.

    Raises:
        UserError: It is not installed.
    """
    if find_spec(module) is None:
        names = " or ".join(f"'rlflow-llm[{extra}]'" for extra in extras)
        raise UserError(f"{what} needs {module}, which is not installed; pip install {names}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean "x"?` with the known name nearest to `name`, or nothing where none is near."""
    nearest = get_close_matches(name, known, n=1)
    return f' Did you mean "{nearest[0]}"?' if nearest else ""


def shortened(text: str, most: int = READ) -> str:
    """A text that is too long, without its middle and with the number of letters left out."""
    if len(text) <= most:
        return text
    last = most // 4
    return text[: most - last] + MORE.format(len(text) - most) + " ... " + text[-last:]


def shown(text: str) -> str:
    """A text for a log or a terminal: a line, or a whole text, that is too long is shown without its middle."""
    return "\n".join(shortened(line, SHOWN) for line in shortened(text, WHOLE).split("\n"))


def readable(text: str) -> str:
    """A text in which control characters other than line ends are shown as Python writes them."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def readable_line(text: str) -> str:
    """Like `readable`, in one line: a line end is shown as Python writes it, too."""
    return readable(text).replace("\n", "\\n")


def one_line(error: BaseException) -> str:
    """The message of another library's error in one line; its type if the message is empty or cannot be made."""
    try:
        text = str(error)
    except Exception as failure:
        return f"its text cannot be made (`{type(error).__name__}.__str__` raised {type(failure).__name__})"
    return " ".join(shortened(text).split()) or type(error).__name__


def line_log(name: str) -> logging.Logger:
    """A module's log for texts from a model, a dataset or a reward: each message is one readable line."""
    log = logging.getLogger(name)
    log.addFilter(_in_one_line)
    return log


def _in_one_line(record: logging.LogRecord) -> bool:
    record.msg, record.args = readable_line(shown(record.getMessage())), None
    return True


def no_file(path: str, wanted: str, *endings: str) -> str:
    """The end of an error about a path with no file: what is at the path, and what to give.

    Args:
        path: Path as the user wrote it.
        wanted: The thing to give instead, for the error.
        endings: Endings of such a file's name. If the path is a folder that has such a file, the error mentions it.
    """
    if not path:
        return f", which names nothing; give {wanted}"
    if os.path.isdir(path):
        inside = sorted(os.listdir(path)) if os.access(path, os.R_OK) else []
        near = next((f", such as {Path(path, name)}" for name in inside if name.endswith(endings)), "")
        return f", which is a folder; give {wanted}{near}"
    if os.path.exists(path):
        return f", which is a device or a pipe; give {wanted}"
    return f", and there is no such file in {Path.cwd()}; check the path"
