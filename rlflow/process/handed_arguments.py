"""Arguments that hold secrets reach the ranks that rank 0 starts unseen: every user can read command lines in /proc."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

VARIABLE = "RLFLOW_ARGUMENTS"  # of a rank; only its user can read its environment

_takes_them = False


def take() -> None:
    """Make `sys.argv` what rank 0 was given, in a rank that it started; called by a command before it is read."""
    global _takes_them
    _takes_them = True
    handed_on = os.environ.pop(VARIABLE, None)
    if handed_on is not None:
        sys.argv[1:] = json.loads(handed_on)


@contextmanager
def handed(shown: Sequence[str]) -> Iterator[None]:
    """Within, ranks are started with other arguments, if they are ranks of a command that calls `take`.

    Args:
        shown: The arguments without what is secret.
    """
    given = sys.argv
    if not _takes_them or list(shown) == given[1:]:
        yield
        return
    os.environ[VARIABLE] = json.dumps(given[1:])
    sys.argv = [given[0], *shown]
    try:
        yield
    finally:
        sys.argv = given
        del os.environ[VARIABLE]
