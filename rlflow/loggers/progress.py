"""A run's progress in a line: live on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from rlflow.errors import readable

# The metric of each label, and its form; shown if the run logs it.
SHOWN = {
    "reward": ("reward/mean", "{:.3f}"),
    "accuracy": ("val/accuracy", "{:.3f}"),
    "margin": ("val/margin", "{:.3f}"),
    "length": ("rollout/length", "{:.1f}"),
}
SAMPLED = ("reward/mean", "rollout/length")  # beside which no loss is shown: a policy's says nothing of progress
LOSS = "/loss"  # of a role
RECENT = 10  # steps from whose pace the time left is estimated


class Display(ABC):
    """Shows the steps of a run as they end.

    Args:
        terminal: Where to.
        total_steps: Of the run.
        steps_done: Before this run, when it goes on from a checkpoint.
        now: Seconds of a clock that only goes forward, at the start.
    """

    def __init__(self, terminal: TextIO, total_steps: int, steps_done: int, now: float) -> None:
        self.terminal = terminal
        self.total_steps = total_steps
        self._latest: dict[str, str] = {}
        self._ended = deque([(steps_done, now)], maxlen=RECENT + 1)

    def begin(self, now: float) -> None:
        """The first step starts: what went before, such as loading, says nothing of the pace."""
        steps_done, _ = self._ended.pop()
        self._ended.append((steps_done, now))

    @abstractmethod
    def step(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        """Show that step `step` ended at `now`."""

    @abstractmethod
    def say(self, line: str) -> None:
        """Show a line of its own."""

    def close(self) -> None:  # noqa: B027 (a line per step has nothing to close)
        """Leave the terminal as text can follow."""

    def fields(self, step: int, metrics: Mapping[str, float], now: float) -> str:
        """`reward 0.512  accuracy 0.430  length 12.3  tokens/s 5,321  left 2:10`; `loss` where nothing is sampled."""
        for label, (metric, form) in SHOWN.items():
            if metric in metrics:
                self._latest[label] = f"{label} {form.format(metrics[metric])}"
        shown = [self._latest[label] for label in SHOWN if label in self._latest]
        if not any(metric in metrics for metric in SAMPLED):
            shown = [*_losses(metrics), *shown]
        if "rollout/tokens" in metrics and metrics.get("time/step", 0) > 0:
            shown.append(f"tokens/s {metrics['rollout/tokens'] / metrics['time/step']:,.0f}")
        self._ended.append((step, now))
        return "  ".join([*shown, f"left {duration(self._seconds_left())}"])

    def _seconds_left(self) -> float:
        (first_step, began), (step, ended) = self._ended[0], self._ended[-1]
        return (ended - began) / (step - first_step) * (self.total_steps - step)


def _losses(metrics: Mapping[str, float]) -> list[str]:
    """Of the roles that were trained; `loss 0.512`, with the role's name where there are several."""
    roles = [name.removesuffix(LOSS) for name in metrics if name.endswith(LOSS) and not name.startswith("val")]
    return [f"{role + ' ' if len(roles) > 1 else ''}loss {metrics[role + LOSS]:.3f}" for role in roles]


class LinePerStep(Display):
    """One plain line per step, for logs and pipes."""

    def step(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        self.say(f"step {step}/{self.total_steps}  {self.fields(step, metrics, now)}")

    def say(self, line: str) -> None:
        print(readable(line), file=self.terminal, flush=True)


class LiveBar(Display):
    """A bar that moves in place."""

    def __init__(self, terminal: TextIO, total_steps: int, steps_done: int, now: float) -> None:
        super().__init__(terminal, total_steps, steps_done, now)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[shown]}"),
            console=RichConsole(file=terminal),
            redirect_stdout=False,  # what is printed goes to the log
            redirect_stderr=False,
            refresh_per_second=2,
        )
        self._bar = self._progress.add_task("", total=total_steps, completed=steps_done, shown="")
        self._progress.start()

    def step(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        self._progress.update(self._bar, completed=step, shown=self.fields(step, metrics, now))

    def say(self, line: str) -> None:
        self._progress.console.print(readable(line), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def duration(seconds: float) -> str:
    """`2:10` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
