"""A run of small steps that sends itself signals, in a folder of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import own_folder
from tests.checkpoint_files import load_model

CALLBACK = '''
import os
import random
import signal
import time

from rlflow.callbacks import Callback


def odd(response, row):
    return float(sum(ord(character) % 2 for character in response))


class SendsItself(Callback):
    """Sends this process a signal before the first task of a step whose text begins so, on one rank or all."""

    def __init__(self, number: int, task: str, step: int, rank: int | None = None) -> None:
        self.number, self.task, self.step, self.rank = number, task, step, rank

    def _send(self, trainer, here: bool) -> None:
        if here and self.rank in (None, trainer.global_rank):
            self.task = "sent"
            os.kill(os.getpid(), self.number)
            time.sleep(0.3)

    def on_task_start(self, trainer, module, task, step) -> None:
        self._send(trainer, step == self.step + 1 and " ".join(task.split()).startswith(self.task))

    def on_validation_end(self, trainer, module, step, metrics) -> None:
        self._send(trainer, step == self.step and self.task == "validation")

    def on_step_end(self, trainer, module, step, metrics) -> None:
        self._send(trainer, step == self.step and self.task == "end of step")

    def on_fit_start(self, trainer, module) -> None:
        self._send(trainer, self.task == "begin")

    def on_exception(self, trainer, module, error) -> None:
        if trainer.global_rank == 0:
            print(f"on_exception: {type(error).__name__}")


class Dies(Callback):
    """Is killed on one rank, every so many steps on average, before a task by chance. Each attempt draws anew.

    Args:
        seed: Of what is drawn.
        every: Steps.
        at: Step, from 1, at which the first attempt dies for certain.
        until: Attempts, from 0, that none dies in any more.
    """

    def __init__(self, seed: int, every: int, at: int | None = None, until: int = 10**9) -> None:
        self.seed, self.every, self.at, self.until = seed, every, at, until
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.step, self.left = -1, 0

    def on_task_start(self, trainer, module, task, step) -> None:
        if step != self.step:
            self.step, self.left = step, self._drawn(trainer, step)
        self.left -= 1
        if self.left == 0:
            with open("deaths.txt", "a") as file:
                file.write(f"attempt {self.attempt}, rank {trainer.global_rank}: step {step}, {task}\\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def _drawn(self, trainer, step: int) -> int:
        """Before which task from here this rank dies; 0 for none."""
        draw = random.Random(f"{self.seed} {self.attempt} {step}")
        dies = draw.random() * self.every < 1 or (self.attempt == 0 and step == self.at)
        rank, task = draw.randrange(trainer.world_size), draw.randint(1, 8)
        return task if dies and self.attempt < self.until and rank == trainer.global_rank else 0


class Waits(Callback):
    """Says where the run is, and waits there."""

    def __init__(self, task: str, step: int, seconds: float) -> None:
        self.task, self.step, self.seconds = task, step, seconds

    def on_task_start(self, trainer, module, task, step) -> None:
        if step == self.step + 1 and " ".join(task.split()).startswith(self.task):
            open(f"waits-{trainer.global_rank}", "w").close()
            time.sleep(self.seconds)
'''


def make(folder: Path, **changes: Any) -> Path:
    """The folder with `my.yaml` and a model of its own for both runs."""
    folder.mkdir(exist_ok=True)
    own_folder.make(folder)
    (folder / "my_callbacks.py").write_text(CALLBACK)
    reward = {"class_path": "rlflow.rewards.CallableReward", "init_args": {"function": "my_callbacks.odd"}}
    settings = {
        "trainer.max_steps": 3,
        "module.init_args.actor.optimizer": {"lr": 3e-3},
        "module.init_args.reward": reward,
    }
    own_folder.write(folder / "my.yaml", settings | {key.replace("__", "."): x for key, x in changes.items()})
    return folder


def sends(number: int, task: str, step: int, rank: int | None = None) -> str:
    """The option by which a run sends itself a signal."""
    given = {"number": int(number), "task": task, "step": step, "rank": rank}
    return f"--callbacks={json.dumps([{'class_path': 'my_callbacks.SendsItself', 'init_args': given}])}"


def left(run: Path) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """The trained weights to the byte, and the metrics of all steps, times aside."""
    weights = {name: tensor.numpy().tobytes() for name, tensor in load_model(run / "model").items()}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return weights, [{name: x for name, x in line.items() if not name.startswith("time/")} for line in lines]


def waits(task: str, step: int, seconds: float) -> str:
    """The option by which a run waits before a task, and writes a file `waits-<rank>`."""
    given = {"task": task, "step": step, "seconds": seconds}
    return f"--callbacks={json.dumps([{'class_path': 'my_callbacks.Waits', 'init_args': given}])}"
