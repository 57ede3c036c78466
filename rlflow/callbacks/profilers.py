"""Profilers of a run, for `trainer.profiler`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rlflow.callbacks.callback import Callback, RunningTrainer
from rlflow.errors import UserError
from rlflow.module import RLModule

PART = "time/"  # how names of metrics begin that are seconds of a part of a step
NO_PART = {"time/elapsed", "time/straggler_rank", "time/straggler_share"}
PROFILED = "profiler"  # folder in the run's folder


class SimpleProfiler(Callback):
    """Prints the seconds of each node and other parts of a step when the run ends, as Lightning's of that name."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def on_fit_start(self, trainer: RunningTrainer, module: RLModule) -> None:
        self._seconds.clear()

    def on_step_end(self, trainer: RunningTrainer, module: RLModule, step: int, metrics: dict[str, float]) -> None:
        for name, seconds in metrics.items():
            if name.startswith(PART) and name not in NO_PART:
                self._seconds[name.removeprefix(PART)].append(seconds)

    def on_fit_end(self, trainer: RunningTrainer, module: RLModule) -> None:
        for line in self.table() if self._seconds else ():
            trainer.print(line)

    def table(self) -> list[str]:
        """Lines of the table: mean and total seconds on the slowest rank, and the share of all steps."""
        lines = [f"{'part of a step':<32}{'mean s':>10}{'steps':>8}{'total s':>11}{'share':>8}"]
        whole = sum(self._seconds["step"])
        for name, seconds in sorted(self._seconds.items(), key=lambda part: -sum(part[1])):
            total = sum(seconds)
            mean, share = total / len(seconds), total / whole
            lines.append(f"{name:<32}{mean:>10.3f}{len(seconds):>8}{total:>11.2f}{share:>8.1%}")
        return lines


class PyTorchProfiler(Callback):
    """Writes what torch's profiler records of steps 3 to 5 of a run, for each rank: `profiler/rank<r>.json`.

    Chrome's `chrome://tracing` and ui.perfetto.dev show the file.
    """

    def __init__(self) -> None:
        self._profiler: Any = None
        self._recorded = False

    def on_fit_start(self, trainer: RunningTrainer, module: RLModule) -> None:
        from torch.profiler import profile, schedule

        def record(profiler: Any) -> None:
            profiler.export_chrome_trace(str(file))
            self._recorded = True

        file = trainer.folder / PROFILED / f"rank{trainer.global_rank}.json"
        file.parent.mkdir(exist_ok=True)
        self._recorded = False
        self._profiler = profile(schedule=schedule(wait=1, warmup=1, active=3, repeat=1), on_trace_ready=record)
        self._profiler.start()

    def on_step_end(self, trainer: RunningTrainer, module: RLModule, step: int, metrics: dict[str, float]) -> None:
        self._profiler.step()

    def on_fit_end(self, trainer: RunningTrainer, module: RLModule) -> None:
        self._profiler.stop()
        if not self._recorded:
            trainer.print("`trainer.profiler` is pytorch, which records from step 3 on, and nothing is recorded before")

    def on_exception(self, trainer: RunningTrainer, module: RLModule, error: BaseException) -> None:
        if self._profiler is not None:
            self._profiler.stop()


def profiler_named(name: str) -> Callback:
    """The profiler of `trainer.profiler`.

    Raises:
        UserError: There is none of that name.
    """
    known = {"simple": SimpleProfiler, "pytorch": PyTorchProfiler}
    if name not in known:
        raise UserError(f"`trainer.profiler` is {name!r}; give {' or '.join(known)}, or leave it out")
    return known[name]()
