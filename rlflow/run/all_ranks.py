"""What ranks do so that all of them end alike: what one could not do, all of them say."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlflow.databuffer.message import from_message, to_message
from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError
from rlflow.storage.draft import not_written


def gather(transport: Transport, here: Any) -> list[Any]:
    """What is JSON-able, of every rank; called by all."""
    messages = transport.all_gather_ragged(to_message(json.dumps(here).encode()))
    return [json.loads(from_message(message)) for message in messages]


def attempt(transport: Transport, folder: Path, action: Callable[[], None]) -> dict[int, str]:
    """Do it on this rank; ranks learn from one another whether they could.

    Args:
        transport: To the other ranks, all of which call this.
        folder: Named where a file cannot be written.
        action: Of this rank.

    Returns:
        The machine's name of every rank.

    Raises:
        UserError: A rank could not.
    """
    rank, node, failed, why = transport.rank, socket.gethostname(), None, None
    try:
        action()
    except Exception as error:
        failed, why = error, not_written(error, folder, rank, node)
    ranks = gather(transport, {"node": node, "why": why})
    if failed is not None and not isinstance(failed, UserError | OSError):
        raise failed
    for of in ranks:
        if of["why"] is not None:
            raise UserError(of["why"]) from failed
    return {number: of["node"] for number, of in enumerate(ranks)}
