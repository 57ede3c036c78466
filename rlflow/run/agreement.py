"""Agreement of ranks: code, config, data and model files are the same before step 0, and actions succeed on all."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path, PurePath
from typing import Any

from rlflow.databuffer.transport import Transport, from_message, to_message
from rlflow.errors import UserError
from rlflow.module import RLModule
from rlflow.storage.draft import not_written

RLFLOW = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers")
DEEPEST = 6  # levels of objects and containers in one another that are compared
PLAIN = (bool, int, float, str, PurePath, type(None))


# What must be the same on every rank. First lines, in the order in which they are compared. Then digests by name that
# some ranks may lack, such as those of imported code; they are compared before the lines, where both ranks have them.
Facts = tuple[list[str], dict[str, str]]


def facts(
    module: RLModule,
    config: str | None,
    plan: str,
    models: Mapping[str, Mapping[str, str]],
    **numbers: int | str,
) -> Facts:
    """All facts of a run, to be compared between ranks.

    Args:
        module: The algorithm; its arguments are compared, and those of its rewards and environments.
        config: Config as it was read; None for a run without one.
        plan: Plan as it is printed.
        models: Digest of each file, by role.
        numbers: More facts, by name.
    """
    digests = {f"code of {name}": digest for name, digest in _code().items()}
    digests |= {f"file {name} of `{role}`": digest for role, files in models.items() for name, digest in files.items()}
    lines = [
        *(f"{name}: {value}" for name, value in _versions().items()),
        *(f"{name}: {value}" for name, value in numbers.items()),
        *(f"config: {line}" for line in (config or "").splitlines()),
        *(f"plan: {line}" for line in plan.splitlines()),
        *_lines("module", module),
    ]
    return lines, digests


def agree(transport: Transport, mine: Facts) -> None:
    """Return when every rank has the same facts; a collective of all ranks.

    Raises:
        UserError: A rank has other facts; the error names it, and the first line that differs from rank 0's.
    """
    lines, where_both = mine
    content = [lines, sorted(where_both.items())]
    digest = hashlib.sha256(json.dumps(content).encode()).digest()
    if len({from_message(each) for each in transport.all_gather(to_message(digest))}) == 1:
        return
    first, *others = ((lines, dict(known)) for lines, known in transport.gather_json(content))
    for rank, theirs in enumerate(others, start=1):
        if (found := _difference(first, theirs)) is not None:
            here, there = found
            raise UserError(
                f"rank {rank} was started for another run than rank 0: `{there}` there and `{here}` here; start every"
                " rank with the same config, code and data"
            )


def _difference(first: Facts, other: Facts) -> tuple[str, str] | None:
    (first_lines, first_known), (other_lines, other_known) = first, other
    for name, digest in first_known.items():
        if other_known.get(name, digest) != digest:
            return f"{name}: {digest}", f"{name}: {other_known[name]}"
    pairs = zip_longest(first_lines, other_lines, fillvalue="nothing more")
    return next(((here, there) for here, there in pairs if here != there), None)


def _versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on, and a digest of rlflow's code."""
    code = hashlib.sha256()
    for file in sorted(RLFLOW.rglob("*.py")):
        code.update(f"{file.relative_to(RLFLOW)}\n".encode() + file.read_bytes())
    packages = {name: version(name) for name in PACKAGES}
    return {"Python": platform.python_version(), **packages, "code of rlflow": code.hexdigest()[:12]}


def _code() -> dict[str, str]:
    """A digest of each imported module that belongs neither to Python, nor to an installed package, nor to rlflow."""
    theirs = (f"{sysconfig.get_path('stdlib')}/", f"{RLFLOW}/")
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or "-packages/" in file or file.startswith(theirs) or not Path(file).is_file():
            continue
        found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    return found


def _lines(name: str, value: Any, depth: int = 0) -> Iterator[str]:
    """Lines that describe a value: the entries of a container, the arguments of an object's constructor.

    Arguments are found as attributes of the same name.
    """
    if depth > DEEPEST:
        return
    if isinstance(value, PLAIN):
        yield f"{name}: {value!r}"
    elif inspect.isfunction(value):
        yield f"{name}: {value.__module__}.{value.__qualname__}, {_of_function(value)}"
    elif isinstance(value, set | frozenset):  # in an order that is the same everywhere
        yield from sorted(line for each in value for line in _lines(f"{name}[]", each, depth + 1))
    elif isinstance(value, list | tuple | dict):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _lines(f"{name}[{key!r}]", each, depth + 1)
    elif hasattr(value, "__dict__") and not inspect.ismodule(value):
        yield f"{name}: {type(value).__module__}.{type(value).__qualname__}"
        for each in inspect.signature(type(value).__init__).parameters:
            if each in vars(value):
                yield from _lines(f"{name}.{each}", vars(value)[each], depth + 1)


def _of_function(function: Any) -> str:
    """A digest of a function, also of a function from a notebook or a prompt, which has no file."""
    plain = [each for each in function.__code__.co_consts if isinstance(each, PLAIN)]
    return hashlib.sha256(function.__code__.co_code + repr(plain).encode()).hexdigest()[:12]


WHOLE = 64 * 2**20  # bytes of the largest file that is read whole; of a larger one, its size and some blocks
BLOCKS, BLOCK = 64, 64 * 2**10
READ = {".json", ".safetensors", ".bin", ".jinja", ".model", ".txt", ".py"}  # read by transformers


def model_files(model: Path) -> dict[str, str]:
    """A digest of each file that a model is read from, by name.

    Of a file of more than 64 MiB only 4 MiB are read: the beginning, where safetensors has names and places of tensors,
    and blocks all through the file. This is enough to tell two trainings apart, but not to find a flipped byte.

    Args:
        model: A folder, or a Hugging Face name that is in the cache.
    """
    folder = model if model.is_dir() else _cached(model)
    if folder is None:
        return {}
    return {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.suffix in READ and path.is_file()}


def _cached(model: Path) -> Path | None:
    from transformers.utils.hub import cached_file

    found = cached_file(str(model), "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found).parent


def _digest(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
        digest = hashlib.sha256(str(size).encode())
        for block in range(BLOCKS):
            digest.update(os.pread(file.fileno(), BLOCK, (size - BLOCK) * block // (BLOCKS - 1)))
    return digest.hexdigest()[:12]


def attempt(transport: Transport, folder: Path, action: Callable[[], None]) -> dict[int, str]:
    """Do an action on this rank, and raise an error on all ranks if it failed on one; called by all ranks.

    Args:
        transport: Transport to the other ranks.
        folder: Folder that the error names if a file cannot be written.
        action: Action of this rank.

    Returns:
        The name of every rank's machine, by rank.

    Raises:
        UserError: The action failed on a rank.
    """
    rank, node, failed, why = transport.rank, socket.gethostname(), None, None
    try:
        action()
    except Exception as error:
        failed, why = error, not_written(error, folder, rank, node)
    ranks = transport.gather_json({"node": node, "why": why})
    if failed is not None and not isinstance(failed, UserError | OSError):
        raise failed
    for of in ranks:
        if of["why"] is not None:
            raise UserError(of["why"]) from failed
    return {number: of["node"] for number, of in enumerate(ranks)}
