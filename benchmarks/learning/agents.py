"""Do policies learn to speak with environments? Tools that they must call, and turns that they must save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.learning.gates import ACCURACY, Run
from benchmarks.learning.runs import Start, Task
from benchmarks.learning.table import NOT_TRAINED, before_and_after, each, runs_of, with_error

NAMES = "agents/"
CALLS, TURNS, REWARD = "val/tool_calls", "val/turns", "val/reward"


@dataclass(frozen=True)
class Move:
    """Change that a number of validation must show, from before the first step to after the last.

    Attributes:
        metric: Name of the metric.
        by: Amount by which it must rise; negative if it must fall.
        to: Value that it must exceed afterwards.
    """

    metric: str
    by: float
    to: float | None = None

    def passes(self, run: Run) -> bool:
        """Whether a run shows it."""
        before, after = before_and_after(run, self.metric)
        moved = after - before > self.by if self.by >= 0 else after - before < self.by
        return moved and (self.to is None or after > self.to)

    def __str__(self) -> str:
        asked = f"{self.by:+g}"
        return asked if self.to is None else f"{asked}, to above {self.to:g}"


def agent(config: str, start: str) -> Task:
    """A training by a config, from the model that another left."""
    return Task(f"{NAMES}{config}", f"configs/{config}.yaml", needs=(Start(start, f"configs/{start}.yaml"),))


AGENTS: Mapping[Task, tuple[Move, ...]] = {
    agent("agent_calculator", "agent_sft"): (Move(CALLS, 0.4), Move(ACCURACY, 0.3)),
    # Four calls in five do what they should, so who never tries again is right in 0.8 at most.
    agent("agent_failing_tool", "agent_sft"): (Move(CALLS, 0.4), Move(ACCURACY, 0.3, to=0.8)),
    agent("agent_guess", "agent_guess_sft"): (Move(TURNS, -0.5), Move(REWARD, 0.05)),
    # Of 128 rows: a difference of two accuracies has a standard error of 0.055.
    agent("agent_harness", "agent_harness_sft"): (Move(CALLS, 0.3), Move(ACCURACY, 0.2)),
    agent("agent_curl", "agent_harness_sft"): (Move(CALLS, 0.3), Move(ACCURACY, 0.2)),
}


def failed(task: Task) -> list[str]:
    """Gates that a seed of a finished training did not pass."""
    runs = runs_of(task)
    return [f"{task.name} failed: {move.metric}" for move in AGENTS[task] if not all(map(move.passes, runs))]


def table() -> list[str]:
    """A line for each number of each training: seed by seed, and by how much it moved."""
    lines = ["| config | steps | validation | before | after | change | threshold | passed |", "|" + "---|" * 8]
    for task, moves in AGENTS.items():
        name = f"`{task.name.removeprefix(NAMES)}`"
        if not task.complete():
            lines.append(f"| {name} | {NOT_TRAINED} |" + " |" * 6)
            continue
        runs = runs_of(task)
        for move in moves:
            starts, ends = zip(*(before_and_after(run, move.metric) for run in runs), strict=True)
            change = with_error([after - before for before, after in zip(starts, ends, strict=True)])
            passed = "yes" if all(map(move.passes, runs)) else "no"
            steps = int(runs[0][-1]["step"])
            cells = [name, str(steps), f"`{move.metric}`", each(starts), each(ends), change, str(move), passed]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def panels() -> dict[str, tuple[str, list[Run]]]:
    """The numbers of each training by step."""
    return {
        f"{task.name.removeprefix(NAMES)}: {move.metric}": (move.metric, runs_of(task))
        for task, moves in AGENTS.items()
        for move in moves
    }
