"""Classes by their path in a config."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from rlflow.config.describing import class_example
from rlflow.dotted_path import object_at
from rlflow.errors import UserError, did_you_mean

WITH_CLASSES = (
    "rlflow",
    "rlflow.algorithms",
    "rlflow.callbacks",
    "rlflow.data",
    "rlflow.loggers",
    "rlflow.rewards",
    "rlflow.rollout",
    "rlflow.strategies",
)
SHORT_NAMES = {
    "deepspeed": "rlflow.strategies.DeepSpeedStrategy",
    "fsdp": "rlflow.strategies.FSDPStrategy",
    "single": "rlflow.strategies.SingleProcess",
}

_DATA = {".jsonl": "JSONL", ".json": "JSONL", ".parquet": "Parquet"}  # by the end of a file's name
_HUB_NAME = re.compile(r"\w[\w-]*/[\w-]+(\.[\d.]+)?")


def class_named(path: str, bases: Sequence[type]) -> type:
    """The class of a `class_path`; rlflow's own are found by their name alone.

    Raises:
        UserError: There is none, it cannot be imported, or it is none of `bases`. The message goes on after the key.
    """
    if not all(part.isidentifier() for part in path.split(".")):
        example, _ = class_example(bases)
        near = f", such as {example}" if example else ""
        found = _of_data(path, bases) or f"which is no path of a class; write module.Class{near}"
        raise UserError(f"is {path!r}, {found}")
    if "." not in path:
        return _without_module(path, bases)
    try:
        found = object_at(path, f"names the class {path}", WITH_CLASSES)
    except UserError as error:
        if of_data := _of_data(path, bases):
            raise UserError(f"is {path!r}, {of_data}") from error
        raise
    if not inspect.isclass(found) or not issubclass(found, tuple(bases)):
        kinds = " or ".join(base.__name__ for base in bases)
        raise UserError(f"names the class {path}, which is no {kinds}; name one that is{such_as(path, bases)}")
    cls: type = found
    return cls


def _of_data(path: str, bases: Sequence[type]) -> str:
    """What a path of data is where a class of data is expected, and what to write; empty where it is none."""
    hub = "HuggingFace" if _HUB_NAME.fullmatch(path) else ""
    name = next((name for ending, name in _DATA.items() if path.endswith(ending)), hub)
    if not name or not issubclass(object_at(f"rlflow.data.{name}", name), tuple(bases)):
        return ""
    form = f"`class_path: rlflow.data.{name}` and `init_args: {{path: {path}}}`"
    return f"which names data, and a class is expected; write {form}"


def such_as(path: str, bases: Sequence[type]) -> str:
    """`, such as Name`: that of rlflow's own classes of these whose name is nearest, or nothing where there is none."""
    made = {name.lower(): name for name, cls in _own(bases).items() if cls not in bases and not inspect.isabstract(cls)}
    nearest = get_close_matches(path.rpartition(".")[2].lower(), made, n=1, cutoff=0.0)
    return f", such as {made[nearest[0]]}" if nearest else ""


def _own(bases: Sequence[type]) -> dict[str, type]:
    """rlflow's classes of these, by name."""
    known: dict[str, type] = {}
    for module in map(import_module, WITH_CLASSES):
        named = {each: getattr(module, each) for each in dir(module)}
        known |= {each: cls for each, cls in named.items() if inspect.isclass(cls) and issubclass(cls, tuple(bases))}
    return known


def _without_module(name: str, bases: Sequence[type]) -> type:
    known = _own(bases)
    if name in known:
        return known[name]
    short = [each for each, path in SHORT_NAMES.items() if path.rpartition(".")[2] in known]
    hint = did_you_mean(name, [*known, *short]) or f" Write `module.{name}`"
    raise UserError(f"names the class {name}, which is not known without its module.{hint}")
