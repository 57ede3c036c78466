"""A simulation as one screen of text."""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.memory.estimate import memory_lines
from rlflow.simulate.designs import DESIGNS, MEANING, StepTimeline
from rlflow.simulate.run_phases import phase_lines
from rlflow.simulate.simulation import PredictedStep, Simulation
from rlflow.storage.space import in_bytes


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
