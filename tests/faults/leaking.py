"""A callback that records the memory, files, threads and processes of a rank, for runs in a folder of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil

from rlflow.callbacks.callback import Callback


class Measures(Callback):
    """Appends a line to `held<rank>.jsonl` after every so many steps."""

    def __init__(self, every: int = 50) -> None:
        self.every = every

    def on_step_end(self, trainer: Any, module: Any, step: int, metrics: Any) -> None:
        if step % self.every:
            return
        process = psutil.Process()
        held = {
            "step": step,
            "memory": process.memory_info().rss,
            "files": process.num_fds(),
            "threads": process.num_threads(),
            "processes": len(process.children(recursive=True)),
        }
        with Path(f"held{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(held) + "\n")
