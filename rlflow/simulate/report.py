"""Prints a simulation as one screen, draws it, and compares the prediction of a run with what was measured."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlflow.data.prompts import Encoder
from rlflow.errors import UserError
from rlflow.loggers.jsonl import METRICS_FILE, read_metrics
from rlflow.memory.estimate import does_not_fit, memory_lines
from rlflow.models.tiny import resolve_model
from rlflow.module import handles
from rlflow.run.checks import resolved
from rlflow.run.placement import followed_role
from rlflow.run.pretrained import load_tokenizer
from rlflow.simulate.designs import DESIGNS, MEANING, StepTimeline, node_seconds
from rlflow.simulate.simulation import Simulation, phase_lines
from rlflow.storage.space import in_bytes

READ = 64  # rows whose prompts say how long prompts are


def show(simulation: Simulation) -> None:
    """Print one screen, and draw `simulation.picture` if that is set; the output of `rlflow simulate`."""
    print("\n".join(screen(simulation)))
    if simulation.picture is not None:
        draw_simulation(simulation, simulation.picture)
        print(f"drew {simulation.picture}")


def screen(simulation: Simulation) -> Iterator[str]:
    """The lines of the screen: workload, a step's work, other placements, memory, phases, and scaling by design."""
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
    """A table of a step's work, `*` on the critical path; `starts` counts from the step's start:

      work                                         kind         starts     takes  share     moves
    * rollout                                      rollout      0.0 us     3.0 s  30.0%
    * rollout -> actor_loss                        exchange      3.0 s     5.0 s  50.0%    2.5 GB
    """
    critical = {work.name for work in timeline.critical_path()}
    yield f"    {'work':<44} {'kind':<9} {'starts':>9} {'takes':>9} {'share':>6} {'moves':>9}"
    for name, work in timeline.works.items():
        mark = "*" if name in critical else " "
        share = f"{work.seconds / timeline.seconds:.1%}"
        moved = in_bytes(work.nbytes) if work.nbytes else ""
        short = name if len(name) <= 44 else f"{name[:43]}…"
        yield (
            f"  {mark} {short:<44} {work.kind:<9} {in_seconds(work.start):>9}"
            f" {in_seconds(work.seconds):>9} {share:>6} {moved:>9}"
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
        cells = [f"{predicted.rate(of):.4g} ({in_seconds(predicted.timelines[of].seconds)})" for of in DESIGNS]
        yield f"  {mark} {ranks:>6} {predicted.workload.prompts:>8}" + "".join(f" {cell:>27}" for cell in cells)


def in_seconds(seconds: float) -> str:
    """Seconds as a text: `12.3 s`, `12.3 ms` or `25.0 us`."""
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


def draw_simulation(simulation: Simulation, path: Path) -> None:
    """Draw the timelines of one step in each design, above the tokens a second by number of ranks.

    The suffix of `path` gives the format, and its folder is made.
    """
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


def _draw_timeline(axes: Any, timeline: StepTimeline, design: str, rows: list[str], named: float) -> None:
    """Draw the bars of one design, a row for each lane; bars longer than `named` seconds carry their name."""
    lanes = dict.fromkeys(lane for work in timeline.works.values() for lane in work.lanes)
    places = {lane: len(rows) + place for place, lane in enumerate(lanes)}
    rows += [f"{design}: {lane}" for lane in lanes]
    for name, work in timeline.works.items():
        for lane in work.lanes:
            axes.barh(places[lane], work.seconds, left=work.start, height=0.7, color=COLOURS[work.kind])
            if work.seconds > named:
                middle = work.start + work.seconds / 2
                axes.text(middle, places[lane], name, ha="center", va="center", fontsize=7, clip_on=True)


@contextmanager
def prediction(simulation: Simulation) -> Iterator[None]:
    """Around a run, on rank 0: print the predicted seconds of a step, and after the run how far they were off.

    Args:
        simulation: The run on its own number of machines and ranks; its lengths are taken from the data.

    Raises:
        UserError: A rank has not enough memory; the error names it, with role and bytes.
    """
    for memory in simulation.predicted.memories:
        if not memory.fits:
            raise UserError(f"the run cannot fit on {simulation.name}: {does_not_fit(memory)}")
    simulation = with_lengths(simulation)
    timeline, lengths = simulation.predicted.timelines["rlflow"], simulation.predicted.workload.lengths
    print(
        f"predicted on {simulation.name}: step {in_seconds(timeline.seconds)}, with"
        f" {lengths.prompt:.1f} + {lengths.response:.1f} tokens a row"
    )
    print("\n".join(work_lines(timeline)))
    yield
    folder = simulation.trainer.folder
    if (folder / METRICS_FILE).is_file():
        print("\n".join(compared(simulation, read_metrics(folder))))


def with_lengths(simulation: Simulation) -> Simulation:
    """The simulation with the mean lengths of the data's first `READ` rows, in tokens.

    Responses that the run samples are not in the data: half of the longest is assumed.
    """
    module, data, graph = simulation.module, simulation.data, simulation.graph
    lead = followed_role(module, graph) or graph.trained_roles()[0]
    with tempfile.TemporaryDirectory() as scratch:
        model = handles(module)[lead]
        tokenizer = load_tokenizer(resolve_model(model.model, Path(scratch), "`model`"), model.trust_remote_code)
    data = resolved(data, module, graph)
    rows = list(range(min(READ, len(data.train))))
    examples = Encoder(data, tokenizer)(data.train, rows)
    prompt = statistics.fmean(len(example.prompt_ids) for example in examples)
    responses = [len(example.response_ids) for example in examples if example.response_ids]
    sampled = any(node.kind == "rollout" for node in graph.order)
    return replace(
        simulation,
        prompt_tokens=min(prompt, data.max_prompt_length),
        response_tokens=None if sampled or not responses else statistics.fmean(responses),
    )


def compared(simulation: Simulation, lines: Sequence[Mapping[str, float | None]]) -> Iterator[str]:
    """Lines of predicted and measured seconds, and the error of the prediction, for each node and the step:

        rewards                       1.2 s      1.0 s    +20%

    Measured is the median over steps, without the first. The prediction is for the measured response length.

    Args:
        simulation: The run, as simulated before it.
        lines: The run's metrics, a mapping for each step: `{"step": 1, "time/step": 4.2, "time/rewards": 1.0, ...}`.
    """
    steps = [line for line in lines if line.get("time/step") is not None]
    if not steps:
        return
    counted = steps[1:] or steps  # the first step compiles, loads and fills caches
    measured = {
        name.removeprefix("time/"): statistics.median(line.get(name) or 0.0 for line in counted)
        for name in counted[-1]
        if name.startswith("time/")
    }
    lengths = [length for line in counted if (length := line.get("rollout/length")) is not None]
    of = ""
    if lengths:
        mean = statistics.fmean(lengths)
        simulation = replace(simulation, response_tokens=mean)
        of = f"with responses of {mean:.1f} tokens, as they were, "
    timeline = simulation.predicted.timelines["rlflow"]
    yield f"predicted against measured, {of}{'the median of ' if len(counted) > 1 else ''}{_steps(counted)}"
    for name, seconds in node_seconds(timeline.works.values()).items():
        if name in measured:
            yield _line(name, seconds, measured[name])
    yield _line("step", timeline.seconds, measured["step"])


def _steps(counted: Sequence[Mapping[str, float | None]]) -> str:
    first, last = (f"{line['step']:.0f}" for line in (counted[0], counted[-1]))
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _line(name: str, predicted: float, measured: float) -> str:
    error = f"{predicted / measured - 1:+.0%}" if measured else ""
    return f"    {name:<24} {in_seconds(predicted):>10} {in_seconds(measured):>10} {error:>7}"
