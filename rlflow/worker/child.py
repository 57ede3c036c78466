"""The program that runs in a worker's process. It is started by its path and imports only the standard library.

Requests and answers are lines of JSON on a socket of their own, so that what the code prints does not mix with them:

    {"function": "my_rewards.brevity", "args": ["...", {}]}      {"value": ...}     also `__main__.seed` of this file
    {"make": "my_env.WordGame", "given": {}}                     {"value": null}    the object stays in the worker
    {"call": "guess", "given": {"word": "house"}}                {"value": ...}     a method of this object
    {"read": "reward"}                                           {"value": ...}     its attribute; null if it has none
    {"call": "guess", "given": {...}, "text": true}              {"value": "..."}   `str` of what the method returns
    any request whose code raises                                {"raised": "ValueError", "text": "...", "where": "..."}

`where` is a file and line such as `my_env.py:31`; empty where text was requested, since that text does not depend on
whether a worker is used.
"""

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import random
import resource
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # see prctl(2)
MOST_TEXT = 2**20  # characters of an error's text; more than is shown of any text
SEEDED: list[Any] = []  # the states of random numbers just after they were seeded


def main(settings: dict[str, Any]) -> None:
    """Set the limits of this process and answer requests until the socket is closed.

    Args:
        settings: Settings from `Worker`: `parent`, the id of its process, with which this one ends; `path`, entries for
            `sys.path`; and the limits `file_bytes` and `memory_bytes`, None for no limit of memory.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings["parent"]:  # it was gone before
        os._exit(1)
    sys.path[:0] = settings["path"]
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: settings["file_bytes"]}
    if settings["memory_bytes"] is not None:
        limits[resource.RLIMIT_AS] = settings["memory_bytes"]
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]  # which cannot be raised
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    os.set_inheritable(settings["socket"], False)  # programs that the code starts do not get it
    requests = os.fdopen(settings["socket"], encoding="utf-8")
    answers = os.fdopen(settings["socket"], "w", encoding="utf-8", closefd=False)
    kept, own = None, os.getpid()
    with asyncio.Runner() as runner:
        for line in requests:
            request, code = json.loads(line), 0
            try:
                value = _answer(request, kept)
                if inspect.isawaitable(value):
                    value = runner.run(_awaited(value))
                if "make" in request:
                    kept, value = value, None
                if "text" in request:
                    value = str(value)
                answer = json.dumps({"value": value}, default=_fields)
            except BaseException as error:  # `exit()` is an error of the code too
                answer = json.dumps(_raised(error) | ({"where": ""} if "text" in request else {}))
                code = int(not isinstance(error, SystemExit) or bool(error.code))
            if os.getpid() != own:  # a fork that the code made came back here: it ends, and answers nobody
                os._exit(code)
            answers.write(answer + "\n")
            answers.flush()


def _answer(request: dict[str, Any], kept: Any) -> Any:
    if "read" in request:
        return getattr(kept, request["read"], None)
    if "call" in request:
        function = getattr(kept, request["call"])
    else:
        function = named(request.get("make") or request["function"])
    return function(*request.get("args", ()), **request.get("given", {}))


def load(path: str) -> None:
    """Import the module at a dotted path; for the path of a class, the module of the class."""
    _module_or_class(path)


def adopt() -> None:
    """From now on, this process becomes the parent of processes whose parent, a child of this process, has ended.

    Nobody waits for such a child, so once it has ended it stays a zombie until this process ends.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def seed(number: int) -> None:
    """Seed `random`, and NumPy where it is imported."""
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number % 2**32)
    SEEDED[:] = _states()


def draws() -> list[Any] | None:
    """The states of random numbers as JSON; None where nothing was drawn since they were seeded."""
    states = _states()
    return None if states == SEEDED else states


def set_draws(of_random: list[Any], of_numpy: list[Any] | None) -> None:
    """Set the states of random numbers to what `draws` returned."""
    version, numbers, gauss = of_random
    random.setstate((version, tuple(numbers), gauss))
    if of_numpy is not None:
        importlib.import_module("numpy").random.set_state(tuple(of_numpy))


def batch_at(path: str, given: dict[str, Any], state: dict[str, Any] | None, logs: list[str]) -> list[Any]:
    """Call the function at the dotted path by `batch_call`."""
    return batch_call(named(path), given, state, logs)


def batch_call(
    function: Callable[..., Any], given: dict[str, Any], state: dict[str, Any] | None, logs: list[str]
) -> list[Any]:
    """Call a reward function of TRL's form, in a worker or in the rank's own process.

    Args:
        function: The function, plain or `async`.
        given: Keyword arguments such as `completions`, lists with an entry for each sample.
        state: Attributes of the argument `trainer_state`; None where the function does not take it.
        logs: Those of the arguments `log_extra` and `log_metric` that the function takes.

    Returns:
        `[value, columns, metrics]`: what the function returned, the columns that it gave to `log_extra`, and the values
        that it gave to `log_metric`, such as `[[1.0, 0.0], {"answer": ["4", "5"]}, {"parsed": [0.5]}]`.
    """
    columns: dict[str, Any] = {}
    metrics: dict[str, list[float]] = {}

    def log_metric(name: str, value: float) -> None:
        metrics.setdefault(name, []).append(float(value))

    def log_extra(column: str, values: Any) -> None:
        columns[column] = list(values)

    known = {"log_extra": log_extra, "log_metric": log_metric}
    given = {**given, **{name: known[name] for name in logs}}
    if state is not None:
        given["trainer_state"] = SimpleNamespace(**state)
    value = function(**given)
    if inspect.isawaitable(value):
        value = asyncio.run(_awaited(value))
    return [value, columns, metrics]


def _states() -> list[Any]:
    """The states of `random`, and of NumPy's legacy generator where it is imported, as JSON."""
    version, numbers, gauss = random.getstate()
    of_numpy = None
    if numpy := sys.modules.get("numpy"):
        kind, array, *rest = numpy.random.get_state()
        of_numpy = [kind, array.tolist(), *rest]
    return [[version, list(numbers), gauss], of_numpy]


def named(path: str) -> Any:
    """The object at a dotted path: in a module, or in a class of it."""
    inside, _, name = path.rpartition(".")
    return getattr(_module_or_class(inside), name)


def _module_or_class(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if "." not in path or not f"{path}.".startswith(f"{error.name}."):  # it is there, and lacks another one
            raise
        return named(path)


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an object such as a dataclass, for JSON."""
    if not hasattr(value, "__dict__"):
        raise TypeError(f"{type(value).__name__} cannot be given as JSON")
    fields: dict[str, Any] = vars(value)
    return fields


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _raised(error: BaseException) -> dict[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if frame.filename != __file__), None)
    where = f"{os.path.basename(last.filename)}:{last.lineno}" if last is not None else ""
    text = " ".join(str(error)[:MOST_TEXT].split()) or type(error).__name__
    return {"raised": type(error).__name__, "text": text, "where": where}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
