"""A rank that is killed or stands still at a point of a run. Written into the folder of a run as `stalls.py`.

`STALL` says how, of which rank, and where: `stop 0 sync`.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from rlflow.callbacks import Callback
from rlflow.rollout import TransformersEngine

HOW, RANK, POINT = os.environ["STALL"].split()


def stall(point: str) -> None:
    """Stall this process, if it is its turn; others watch what happens next."""
    if point != POINT or os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) != RANK:
        return
    Path("stalled.txt").write_text(str(time.time()))
    match HOW:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "spin":
            re.match(r"(a+)+$", "a" * 64 + "b")
        case "sleep":
            time.sleep(600)


class StallingEngine(TransformersEngine):
    """Engine that stalls at points of its own; at the first, the ranks have not met."""

    def check_model(self, *given: Any) -> None:
        stall("start")
        super().check_model(*given)

    def setup(self, *given: Any) -> None:
        stall("load")
        super().setup(*given)

    def generate(self, *given: Any, **named: Any) -> Any:
        stall("rollout")
        return super().generate(*given, **named)

    def update_weights(self, buckets: Any, version: int) -> Any:
        if version:
            stall("sync")
        return super().update_weights(buckets, version)


class Stalls(Callback):
    """Stalls where an engine has no part."""

    def on_task_start(self, trainer: Any, module: Any, task: str, step: int) -> None:
        if task.startswith("train"):
            stall("train")

    def on_step_end(self, *_: Any) -> None:
        self.done = True

    def state_dict(self) -> dict[str, Any]:
        if hasattr(self, "done"):
            stall("save")
        return {"saved": True}
