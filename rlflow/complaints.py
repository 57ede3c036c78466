"""jsonargparse's complaints about a config, as one line: the dotted key, the value, the nearest legal key."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator

from jsonargparse import ArgumentParser

from rlflow.errors import UserError, did_you_mean

_KEY = re.compile(r'Parser key "([^"]+)":')
_UNKNOWN = re.compile(r"Option '([^']+)' is not accepted")
# Lines that say how jsonargparse looked, and not what is wrong.
_NOISE = re.compile(
    r"^\s*(Does not validate|Subtypes:|Errors:|Given value type:|- Expected a <class 'NoneType'>).*$", re.M
)
_GIVEN = re.compile(r"^\s*Given value: (?!NestedArg|Namespace)(.*)$", re.M)
_ANY_GIVEN = re.compile(r"^\s*Given value: .*$", re.M)


def complaint(error: BaseException | str, parser: ArgumentParser, bases: Iterable[type]) -> UserError:
    """What is wrong with a config.

    Args:
        error: jsonargparse's, or its text. A `UserError` that a constructor raised within it is taken as it is.
        parser: Whose keys are legal.
        bases: The classes whose subclasses a config may name; the arguments of all of them are legal keys too.
    """
    if isinstance(error, BaseException):
        for cause in _causes(error):
            if isinstance(cause, UserError):
                return cause
    message = str(error)
    keys = list(dict.fromkeys(_KEY.findall(message)))
    given = _GIVEN.search(message)
    said = _ANY_GIVEN.sub("", _NOISE.sub("", _KEY.sub("", message)))
    said = re.sub(r"<class '([\w.]+)'>", r"\1", said.replace("typing.", ""))
    line = re.sub(r"\s+", " ", re.sub(r"\n\s*-?\s*", "; ", said.strip(" \n-"))).replace("; ;", ";").strip("; ")
    where = f"`{'.'.join(keys)}`: " if keys else ""
    value = f" (given: {given.group(1)})" if given and given.group(1) not in line else ""
    unknown = _UNKNOWN.search(message)
    hint = did_you_mean(unknown.group(1), _legal(parser, bases)) if unknown else ""
    return UserError(f"{where}{line}{value}.{hint}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from or while handling."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _legal(parser: ArgumentParser, bases: Iterable[type]) -> set[str]:
    keys = {part for action in parser._actions for part in str(action.dest).split(".")}
    for base in bases:
        for subclass in _subclasses(base):
            keys |= set(inspect.signature(subclass).parameters)
    return keys


def _subclasses(base: type) -> Iterator[type]:
    subclass: type
    for subclass in base.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
