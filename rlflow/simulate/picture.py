"""A simulation as a picture: the timeline of a step in each design, and how each scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlflow.errors import UserError
from rlflow.simulate.designs import DESIGNS, MEANING, StepTimeline
from rlflow.simulate.simulation import Simulation

COLOURS = {
    "rollout": "#4c78a8",
    "score": "#72b7b2",
    "train": "#f58518",
    "host": "#b279a2",
    "sync": "#54a24b",
    "exchange": "#e45756",
    "control": "#9d755d",
}
SUFFIXES = (".png", ".svg", ".pdf")


def draw_simulation(simulation: Simulation, path: Path) -> None:
    """Draw the timelines, at the size asked for, above the scaling curves."""
    # The object form with its own canvas: no window system, and no state shared with a user's own figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    predicted = simulation.predicted
    figure = Figure(figsize=(11.0, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    rows: list[str] = []
    named = 0.06 * max(timeline.seconds for timeline in predicted.timelines.values())
    for design in DESIGNS:
        _draw_timeline(above, predicted.timelines[design], MEANING[design], rows, named)
    above.set_yticks(range(len(rows)), rows)
    above.invert_yaxis()
    above.set_xlabel("seconds")
    above.set_title(
        f"{type(simulation.module).__name__}, {predicted.workload.ranks} ranks of {simulation.name}: a step"
    )
    for kind, colour in COLOURS.items():
        above.barh(0, 0, color=colour, label=kind)
    above.legend(ncols=len(COLOURS), loc="lower right", fontsize="small")

    ranks = list(simulation.growth)
    for design in DESIGNS:
        rates = [at.rate(design) for at in simulation.growth.values()]
        below.plot(ranks, rates, marker="o", markersize=3, label=MEANING[design])
    first = next(iter(simulation.growth.values()))
    ideal = [first.rate("rlflow") * count / ranks[0] for count in ranks]
    below.plot(ranks, ideal, linestyle=":", color="grey", label="rlflow's rate a rank, kept")
    below.set_xscale("log", base=2)
    below.set_yscale("log", base=2)
    below.set_xticks(ranks, [str(count) for count in ranks])
    below.set_xlabel("ranks")
    below.set_ylabel("tokens/s")
    below.set_title(f"{simulation.scaling} scaling")
    below.grid(alpha=0.3)
    below.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def check_suffix(path: Path) -> None:
    """Refuse what is no picture, before anything is computed."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"`--draw` is {str(path)!r}; end it in one of {', '.join(SUFFIXES)}")


def _draw_timeline(axes: Any, timeline: StepTimeline, design: str, rows: list[str], named: float) -> None:
    """Bars of one design, a row for each lane; those that last as long as `named` have their name on them."""
    lanes = dict.fromkeys(lane for span in timeline.spans.values() for lane in span.work.lanes)
    places = {lane: len(rows) + place for place, lane in enumerate(lanes)}
    rows += [f"{design}: {lane}" for lane in lanes]
    for name, span in timeline.spans.items():
        for lane in span.work.lanes:
            axes.barh(places[lane], span.work.seconds, left=span.start, height=0.7, color=COLOURS[span.work.kind])
            if span.work.seconds > named:
                middle = span.start + span.work.seconds / 2
                axes.text(middle, places[lane], name, ha="center", va="center", fontsize=7, clip_on=True)
