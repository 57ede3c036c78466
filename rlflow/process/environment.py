"""What processes say to one another by environment variables: a place in a job, and arguments that hold secrets."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Fabric, DeepSpeed and vLLM set them for good.
PLACE = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")
ARGUMENTS = "RLFLOW_ARGUMENTS"  # of a rank; only its user can read its environment, and every user command lines

_takes_arguments = False


@contextmanager
def place_kept() -> Iterator[None]:
    """Leave the place as it was: the next run from here would find a job whose ranks somebody else starts, and wait."""
    before = {name: os.environ[name] for name in PLACE if name in os.environ}
    try:
        yield
    finally:
        for name in PLACE:
            os.environ.pop(name, None)
        os.environ.update(before)


def take_arguments() -> None:
    """Make `sys.argv` what rank 0 was given, in a rank that it started; called by a command before it is read."""
    global _takes_arguments
    _takes_arguments = True
    handed_on = os.environ.pop(ARGUMENTS, None)
    if handed_on is not None:
        sys.argv[1:] = json.loads(handed_on)


@contextmanager
def handed_arguments(shown: Sequence[str]) -> Iterator[None]:
    """Within, ranks are started with other arguments, if they are ranks of a command that calls `take_arguments`.

    Args:
        shown: What stands on their command lines, with nothing secret in it.
    """
    given = sys.argv
    if not _takes_arguments or list(shown) == given[1:]:
        yield
        return
    os.environ[ARGUMENTS] = json.dumps(given[1:])
    sys.argv = [given[0], *shown]
    try:
        yield
    finally:
        sys.argv = given
        del os.environ[ARGUMENTS]
