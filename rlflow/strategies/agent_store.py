"""A place of its own for each attempt in the store of torchrun's agent.

torchrun starts ranks again with the same store, in which the addresses of ranks that are gone still lie
(https://github.com/pytorch/pytorch/issues/135712), and its count of restarts may differ from agent to agent.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from rlflow.errors import UserError

POLL_S = 0.05
CALL = "rlflow/call"


def agent_store(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Store | None:
    """The agent's store under a name that this attempt alone has; None where torchrun serves none.

    Args:
        host: Of the store.
        port: Likewise.
        rank: This one.
        world_size: How many ranks there are.
        timeout: For all of them to come.

    Raises:
        UserError: They did not.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    store = TCPStore(host, port, world_size=world_size, is_master=False, timeout=timeout)
    return PrefixStore(agree_on_name(store, rank, world_size, timeout), store)


def agree_on_name(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that no earlier ranks have used; called by all ranks.

    Rank 0 calls by a name that it makes up. The others answer by names of their own, to each call that they find, for
    it may be one of before; rank 0 writes to each of the names that it was answered by.
    """
    mine, until = uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set(CALL, mine)
        for other in range(1, world_size):
            _wait(store, f"{mine}/{other}", until, other)
            store.set(f"{mine}/{store.get(f'{mine}/{other}').decode()}", "")
        return mine
    called = ""
    while True:
        if store.check([CALL]) and (found := store.get(CALL).decode()) != called:
            called = found
            store.set(f"{called}/{rank}", mine)
        if called and store.check([f"{called}/{mine}"]):
            return called
        _pause(until, 0)


def _wait(store: Store, key: str, until: float, other: int) -> None:
    while not store.check([key]):
        _pause(until, other)


def _pause(until: float, other: int) -> None:
    if time.monotonic() > until:
        raise UserError(
            f"rank {other} has not come to the store of torchrun's agent within `timeout_s`; look at what it says, or"
            " raise `strategy.init_args.timeout_s`"
        )
    time.sleep(POLL_S)
