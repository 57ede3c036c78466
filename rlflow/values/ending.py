"""`Ending`, why a conversation is over."""

from __future__ import annotations

from enum import IntEnum


class Ending(IntEnum):
    """Why a conversation is over."""

    DONE = 0  # its environment said so, or a policy with tools called none
    TURNS = 1  # it had as many turns, or calls of tools, as it may
    TOKENS = 2  # it was as long as it may be
    FAILED = 3  # its environment failed
