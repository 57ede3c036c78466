"""Reinforcement-learning post-training of language models, without a central node.

This module has the names that an algorithm is written with. `rlflow.algorithms` has the algorithms, `rlflow.functional`
the maths, `rlflow.rewards` the rewards, and `rlflow.state` state that lasts from step to step. `rlflow.types` has types
of parts of a value, for nodes that need no more.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036  (an older Python could not even read the files that are imported next)
    print(
        "rlflow: error: this is Python {}.{}, and rlflow needs 3.11 or newer; install it, and rlflow into an"
        " environment of it".format(*sys.version_info[:2]),
        file=sys.stderr,
    )
    raise SystemExit(2)

import ast
from importlib import import_module
from pathlib import Path
from typing import Any


def _modules() -> dict[str, str]:
    """The module of each public name, read from `__init__.pyi`, which type checkers read."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [statement for statement in stub.body if isinstance(statement, ast.ImportFrom)]
    return {each.name: str(statement.module) for statement in imports for each in statement.names}


_MODULES = _modules()
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for: a command that trains nothing waits for none of them."""
    if name not in _MODULES:
        raise AttributeError(f"module 'rlflow' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
