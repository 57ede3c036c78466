"""A picture of a run's timeline: a row for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlflow.commands.timeline import Span, Timeline, is_task
from rlflow.loggers.trace import FLIGHT, WAIT

MOST_RANKS = 48  # that are drawn; of more, as many evenly spread
COLOURS = {
    "load": "#bab0ac",
    "weight sync": "#54a24b",
    "exchange": "#e45756",
    "reduce metrics": "#9d755d",
    "save": "#eeca3b",
    "tell": "#ff9da6",
}
NODES = ("#4c78a8", "#f58518", "#72b7b2", "#b279a2", "#9ecae9", "#d8a13a", "#2f6f6b", "#7d5177")


def draw(timeline: Timeline, steps: Sequence[int], path: Path) -> None:
    """Draw a row for each rank: tasks, the waits in them in white, exchanges in progress as a line below."""
    # The object form with its own canvas: no window system, and no state shared with a user's own figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    start, end = timeline.window(steps)
    every = -(-len(timeline.ranks) // MOST_RANKS)
    rows = {rank: row for row, rank in enumerate(timeline.ranks[::every])}
    figure = Figure(figsize=(12.0, 1.8 + 0.45 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = [span for span in timeline.spans if span.rank in rows and span.within(start, end)]
    tasks = [span for span in shown if is_task(span)]
    colours = _colours(tasks)
    for span in tasks:
        axes.barh(rows[span.rank], span.end - span.start, left=span.start - start, height=0.7, color=colours[span.name])
        if span.end - span.start > 0.07 * (end - start):
            middle = (span.start + span.end) / 2 - start
            axes.text(middle, rows[span.rank], span.name, ha="center", va="center", fontsize=7, clip_on=True)
    for span in shown:
        if span.category == WAIT:
            _draw_wait(axes, rows[span.rank], span, start)
        elif span.category == FLIGHT:
            ends = [span.start - start, span.end - start]
            axes.plot(ends, [rows[span.rank] + 0.42] * 2, color=COLOURS["exchange"], linewidth=2)
    _mark_steps(axes, timeline, steps, start)
    for name, colour in colours.items():
        axes.barh(0, 0, color=colour, label=name)
    axes.barh(0, 0, color="white", hatch="////", edgecolor="#666666", linewidth=0, label="waits")
    axes.set_yticks(list(rows.values()), [f"rank {rank}" for rank in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, end - start)
    axes.set_xlabel("seconds")
    figure.legend(ncols=min(8, len(colours) + 1), loc="outside lower center", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _colours(tasks: Sequence[Span]) -> dict[str, str]:
    """A colour for each name: its own for what every run does, the next one for each node."""
    names = dict.fromkeys(span.name for span in tasks)
    nodes = [name for name in names if name not in COLOURS]
    return {name: COLOURS[name] if name in COLOURS else NODES[nodes.index(name) % len(NODES)] for name in names}


def _draw_wait(axes: Any, row: int, span: Span, start: float) -> None:
    bar = (row, span.end - span.start, 0.7, span.start - start)
    axes.barh(*bar, color="white", alpha=0.75, hatch="////", edgecolor="#666666", linewidth=0)


def _mark_steps(axes: Any, timeline: Timeline, steps: Sequence[int], start: float) -> None:
    """A line where a step ends on its last rank, and the steps' numbers above."""
    ends = [start, *(timeline.window([step])[1] for step in steps)]
    for step, (begins, ended) in zip(steps, pairwise(ends), strict=True):
        axes.axvline(ended - start, color="black", linewidth=0.8, linestyle=":")
        axes.text((begins + ended) / 2 - start, -0.62, f"step {step}", ha="center", va="bottom", fontsize=8)
