"""Saves that are killed at each event of the file system, each in a process of its own; run as a script.

Python reports what it is about to open, rename, remove and make to `sys.addaudithook`; a child process that is forked
for it kills itself at the n-th such event below its folder, for every n until a save comes to its end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from rlflow import checkpoint
from rlflow.models.optimizer import Optimizer
from rlflow.models.tiny import write_tiny_model
from rlflow.strategies import SingleProcess
from tests.checkpoint_files import write_checkpoint
from tests.strategies.strategy_update import trained

EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir", "os.truncate"}
# What lies there, the step that is saved, and the steps that a run may go on from after a kill.
CASES = {
    "first": ((), 1, {None, 1}),
    "next": ((1, 2), 3, {2, 3}),
    "again": ((1, 2), 2, {1, 2}),  # continued from 1
    "before others": ((1, 2, 5, 6), 3, {2, 3, 5, 6}),  # continued from 2: those of 5 and 6 go first
}


def killed_at(number: int, folder: Path, save: Any) -> bool:
    """Save in a child that kills itself at this event; whether it came to the event."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            if event in EVENTS and str(folder) in str(arguments[0]):
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        save()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)


def last_of(folder: Path) -> int | None:
    """The step of the last checkpoint that is whole, every file of it; None for none."""
    if not checkpoint.newest_first(folder):
        return None

    def damage(of: Path) -> str | None:
        return checkpoint.lacks(of) or next(iter(checkpoint.changed_files(of, 0, 1)), None)

    found = checkpoint.find("last", folder, damage)
    assert found is not None
    return int(found.name.removeprefix("step-"))


def tried(case: str, folder: Path, strategy: SingleProcess) -> int:
    """Kill a save at every event; how many there are."""
    there, step, may_stay = CASES[case]
    origin = folder / case
    origin.mkdir()
    for earlier in there:
        write_checkpoint(strategy, origin / "all", earlier)
        shutil.copytree(
            origin / "all/checkpoint" / f"step-{earlier:08d}", origin / f"run/checkpoint/step-{earlier:08d}"
        )
    for number in range(1, 1000):
        run = folder / f"{case}-{number}"
        if there:
            shutil.copytree(origin / "run", run)
        else:
            run.mkdir()
        killed = killed_at(number, run, lambda run=run: write_checkpoint(strategy, run, step))
        last = last_of(run)
        assert last in may_stay, (case, number, last)
        assert killed or last == step, (case, number, last)
        following = max(last or 0, step) + 1
        write_checkpoint(strategy, run, following)  # whatever lies there
        names = [path.name for path in sorted((run / "checkpoint").iterdir())]
        assert last_of(run) == following
        assert len(names) <= 2, names
        assert all(checkpoint.lacks(run / "checkpoint" / name) is None for name in names), (case, number, names)
        shutil.rmtree(run)
        if not killed:
            return number - 1
    raise AssertionError("no save came to its end")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    os.fsync = lambda descriptor: None  # a process that is killed loses nothing that it wrote; the machine's end may
    tiny = write_tiny_model(place / "tiny", hidden_size=8, layers=1)
    alone = SingleProcess()
    alone.setup_role("actor", trained(tiny, Optimizer("adamw", lr=1e-2)), tiny)
    print(json.dumps({case: tried(case, place, alone) for case in sys.argv[2:] or CASES}))
