"""Ways in which code of the user's ends a run before its end. Written into the folder of a run as `early_ends.py`."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any

from rlflow import PerSample, node
from rlflow.algorithms import GRPO
from rlflow.callbacks import Callback
from rlflow.types import WithTexts

if os.environ.get("EARLY_END") == f"at import on rank {os.environ.get('LOCAL_RANK')}":
    os._exit(0)


def calls_exit(response: str, row: dict[str, Any]) -> float:
    sys.exit(0)


def leaves(response: str, row: dict[str, Any]) -> float:
    os._exit(0)


def leaves_on_rank_1(response: str, row: dict[str, Any]) -> float:
    if "1" in (os.environ.get("LOCAL_RANK"), os.environ.get("RANK")):
        os._exit(0)
    return 1.0


def leaves_in_a_thread(response: str, row: dict[str, Any]) -> float:
    thread = threading.Thread(target=os._exit, args=(0,))
    thread.start()
    thread.join()
    return 1.0


def leaves_after_a_child_has_ended(response: str, row: dict[str, Any]) -> float:
    """The child goes up the whole stack, as if the run had come to its end in it."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    sys.exit(0)


def raises_before_an_atexit_that_leaves(response: str, row: dict[str, Any]) -> float:
    atexit.register(os._exit, 0)
    raise KeyError("solution")


class LeavesInANode(GRPO):
    @node
    def rewards(self, rollout: WithTexts) -> PerSample:
        os._exit(0)


class CallsExitInANode(GRPO):
    @node
    def rewards(self, rollout: WithTexts) -> PerSample:
        sys.exit(0)


class LeavesAtAStep(Callback):
    def on_step_end(self, *_: Any) -> None:
        os._exit(0)


class CallsExitAtTheEnd(Callback):
    def on_fit_end(self, *_: Any) -> None:
        sys.exit(0)


class LeavesAtReset:
    """An environment."""

    def reset(self, **row: Any) -> str:
        os._exit(0)

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The number.
        """
        return "no"


class CallsExitAtReset(LeavesAtReset):
    def reset(self, **row: Any) -> str:
        sys.exit(0)
