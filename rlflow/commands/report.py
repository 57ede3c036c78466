"""`rlflow report`: where the time of a run's steps went, as a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlflow.commands.parser import OneLineParser, parsed_options
from rlflow.commands.timeline import Timeline, is_task, is_wait, spans
from rlflow.commands.timeline_drawing import MOST_RANKS, draw
from rlflow.commands.trace import chosen_steps, missing_lines, traces_of
from rlflow.errors import UserError
from rlflow.loggers.trace import read_events, step_windows, window_of
from rlflow.metrics import straggler

PICTURE_FILE = "timeline.png"
SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Report:
    """The report of a run's folder.

    Attributes:
        folder: The run's.
        step: The last step that is shown, from 1; None for the run's last.
        steps: How many, up to that one.
        draw: Where the picture goes; None for `timeline.png` in the folder.
    """

    folder: Path
    step: int | None = None
    steps: int = 3
    draw: Path | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"`--steps` is {self.steps}; give 1 or more")
        if self.draw is not None and self.draw.suffix not in SUFFIXES:
            raise UserError(f"`--draw` is {str(self.draw)!r}; end it in one of {', '.join(SUFFIXES)}")

    def show(self) -> None:
        """Print the table, draw the picture. Only events of these steps are held in memory.

        Raises:
            UserError: The folder holds no traces, or not those of the step.
        """
        traces = traces_of(self.folder)
        windows = step_windows(traces)
        shown = chosen_steps(self.folder, windows, self.step, self.steps)
        window = window_of(windows, shown)
        timeline = Timeline(spans(read_events(traces, window=window)))
        print("\n".join(screen(timeline, shown, last=max(windows))))
        for line in missing_lines(traces):
            print(line)
        picture = self.draw or self.folder / PICTURE_FILE
        draw(timeline, shown, picture)
        print(f"drew {picture}")


def read_report(arguments: Sequence[str]) -> Report:
    """What `rlflow report` shows."""
    parser = OneLineParser(
        prog="rlflow report", description="Show where the time of a run's steps went, rank by rank.", allow_abbrev=False
    )
    parser.add_argument("run_dir", type=str, help="the folder of a run, whether it ended or not")
    parser.add_argument("--step", type=int | None, default=None, help="the last step shown; else the run's last")
    parser.add_argument("--steps", type=int, default=3, help="how many, up to that one")
    parser.add_argument(
        "--draw", type=str | None, default=None, help="PATH.png, .svg or .pdf; else RUN_DIR/timeline.png"
    )
    parsed = parsed_options(parser, arguments)
    return Report(Path(parsed.run_dir), parsed.step, parsed.steps, None if parsed.draw is None else Path(parsed.draw))


def screen(timeline: Timeline, steps: Sequence[int], last: int) -> Iterator[str]:
    """The report's lines.

    Args:
        timeline: Of these steps at least.
        steps: That are shown.
        last: Step of the run.
    """
    start, end = timeline.window(steps)
    of_steps = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    yield f"{of_steps} of {last}, {len(timeline.ranks)} ranks: {end - start:.3f} s"
    yield ""
    yield f"    {'':<10} {'works':>7} {'waits':>7} {'idle':>7}"
    shares = {rank: timeline.shares(rank, start, end) for rank in timeline.ranks}
    shown = sorted(sorted(shares, key=lambda rank: -shares[rank][0])[:MOST_RANKS])
    for rank in shown:
        yield f"    {f'rank {rank}':<10}" + "".join(f" {share:7.1%}" for share in shares[rank])
    if len(shown) < len(shares):
        yield f"    ... and {len(shares) - len(shown)} ranks that worked less"
    for title, of in (("tasks", is_task), ("waits", is_wait)):
        found = timeline.seconds(steps, of)
        if found:
            yield ""
            yield f"    {f'{title}, seconds a step':<32} {'mean':>9} {'least':>20} {'most':>20}"
            yield from (_row(name, seconds) for name, seconds in found.items())
    yield ""
    for step in steps:
        slowest = straggler(timeline.worked(step))
        if slowest:
            longest = timeline.ranks[int(slowest["time/straggler_rank"])]
            above = f"{slowest['time/straggler_share']:.1%} above the median"
            yield f"    step {step}: rank {longest} worked longest, {above}"


def _row(name: str, seconds: dict[int, float]) -> str:
    taking = {rank: value for rank, value in seconds.items() if value}
    least, most = min(taking, key=lambda rank: taking[rank]), max(taking, key=lambda rank: taking[rank])
    mean = statistics.fmean(taking.values())
    ends = (f"{taking[rank]:.4f} (rank {rank})" for rank in (least, most))
    return f"    {name:<32} {mean:9.4f}" + "".join(f" {end:>20}" for end in ends)
