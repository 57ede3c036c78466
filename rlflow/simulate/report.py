"""`rlflow simulate --config`: a simulation as one screen, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import UserError
from rlflow.memory.estimate import memory_lines
from rlflow.simulate.designs import DESIGNS, MEANING, StepTimeline
from rlflow.simulate.simulation import PredictedStep, Simulation, phase_lines
from rlflow.storage.space import in_bytes


@dataclass(frozen=True)
class ShownSimulation:
    """A simulation to be shown, and where its picture goes."""

    simulation: Simulation
    draw: Path | None

    def __post_init__(self) -> None:
        if self.draw is not None:
            check_suffix(self.draw)

    def show(self) -> None:
        """Print one screen; draw if asked."""
        print("\n".join(screen(self.simulation)))
        if self.draw is not None:
            draw_simulation(self.simulation, self.draw)
            print(f"drew {self.draw}")


def screen(simulation: Simulation) -> Iterator[str]:
    """Its lines."""
    predicted = simulation.predicted
    load, timeline = predicted.workload, predicted.timelines["rlflow"]
    lengths = load.lengths
    mean, most = (lengths.prompt, lengths.response), (lengths.longest_prompt, lengths.longest_response)
    yield (
        f"{type(simulation.module).__name__} on {load.ranks} ranks: {simulation.nodes} nodes of"
        f" {simulation.hardware.gpus_per_node} {simulation.name}; on paper, never measured at this size"
    )
    yield (
        f"per step: {load.prompts} prompts x {load.group_size}, tokens of a row {mean[0]:g} + {mean[1]:g} on average,"
        f" at most {most[0]} + {most[1]}; {load.tokens:.3g} tokens trained on"
    )
    yield ""
    yield f"step {in_seconds(timeline.seconds)}, {predicted.rate('rlflow'):.4g} tokens/s; * on the critical path"
    yield from work_lines(timeline)
    yield ""
    yield from _alternatives(simulation)
    for memory in predicted.memories:
        yield from memory_lines(memory, every=len(predicted.memories) == 1)
    yield from phase_lines(simulation.phases, predicted.memory.capacity)
    yield ""
    yield from _designs(simulation)


def work_lines(timeline: StepTimeline) -> Iterator[str]:
    """A table of all work."""
    critical = {span.work.name for span in timeline.critical_path()}
    yield f"    {'work':<44} {'kind':<9} {'starts':>9} {'takes':>9} {'share':>6} {'moves':>9}"
    for name, span in timeline.spans.items():
        mark = "*" if name in critical else " "
        share = f"{span.work.seconds / timeline.seconds:.1%}"
        moved = in_bytes(span.work.nbytes) if span.work.nbytes else ""
        yield (
            f"  {mark} {_short(name, 44):<44} {span.work.kind:<9} {in_seconds(span.start):>9}"
            f" {in_seconds(span.work.seconds):>9} {share:>6} {moved:>9}"
        )


def _alternatives(simulation: Simulation) -> Iterator[str]:
    if not simulation.alternatives:
        return
    here = simulation.predicted.timelines["rlflow"].seconds
    yield "the same ranks, placed otherwise"
    for name, other in simulation.alternatives.items():
        seconds = other.timelines["rlflow"].seconds
        marked = "" if other.memory.fits else "; does not fit"
        yield f"    {name:<24} step {in_seconds(seconds)}, {seconds / here:.2f} times as long{marked}"
    yield ""


def _designs(simulation: Simulation) -> Iterator[str]:
    growth = simulation.growth
    yield f"tokens/s by ranks ({simulation.scaling} scaling), and the step; ! where memory is short"
    yield f"    {'ranks':>6} {'prompts':>8}" + "".join(f" {MEANING[design]:>27}" for design in DESIGNS)
    for ranks, predicted in growth.items():
        mark = " " if predicted.memory.fits else "!"
        yield f"  {mark} {ranks:>6} {predicted.workload.prompts:>8}" + _row(predicted)


def _row(predicted: PredictedStep) -> str:
    cells = [f"{predicted.rate(design):.4g} ({in_seconds(predicted.timelines[design].seconds)})" for design in DESIGNS]
    return "".join(f" {cell:>27}" for cell in cells)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def in_seconds(seconds: float) -> str:
    """In the unit that is read easily."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} us"


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
