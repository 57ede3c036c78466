"""A simulation as one screen of text."""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.dag.tasks import rank_ranges
from rlflow.simulate.designs import DESIGNS, MEANING
from rlflow.simulate.memory import Memory
from rlflow.simulate.simulation import Predicted, Simulation
from rlflow.simulate.timeline import Timeline


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
    yield ""
    yield from _designs(simulation)


def work_lines(timeline: Timeline) -> Iterator[str]:
    """A table of all work."""
    critical = {span.work.name for span in timeline.critical_path()}
    yield f"    {'work':<44} {'kind':<9} {'starts':>9} {'takes':>9} {'share':>6} {'moves':>9}"
    for name, span in timeline.spans.items():
        mark = "*" if name in critical else " "
        share = f"{span.work.seconds / timeline.seconds:.1%}"
        moved = _bytes(span.work.nbytes) if span.work.nbytes else ""
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


def memory_lines(memory: Memory, every: bool) -> Iterator[str]:
    """What a rank holds, and what to do where it cannot; `every` if all ranks hold as much."""
    of = "a rank" if every else rank_ranges(memory.ranks)
    yield (
        f"memory of {of}: {_bytes(memory.generating)} generating, {_bytes(memory.training)} training,"
        f" of {_bytes(memory.capacity)}"
    )
    for role, nbytes in memory.weights.items():
        parts = [f"weights {_bytes(nbytes)}"]
        if role in memory.gradients:
            parts += [f"gradients {_bytes(memory.gradients[role])}", f"optimizer {_bytes(memory.optimizer[role])}"]
        yield f"    {role:<10} {', '.join(parts)}"
    yield (
        f"    training   activations {_bytes(memory.activations)}, logits {_bytes(memory.logits)}, gathered"
        f" {_bytes(memory.gathered)}; values of the step {_bytes(memory.held)}"
    )
    if memory.engine_weights:
        yield f"    engine     weights {_bytes(memory.engine_weights)}, cache {_bytes(memory.cache)}"
    if not memory.fits:
        yield f"  ! {does_not_fit(memory)}"


def does_not_fit(memory: Memory) -> str:
    """Which rank lacks how many bytes, what takes most, and what to do about it."""
    rank = memory.ranks[0]
    if memory.cache < 0:
        return (
            f"rank {rank}: the share of `rollout` is {_bytes(-memory.cache)} short of its weights of"
            f" {_bytes(memory.engine_weights)}: raise rollout.init_args.gpu_memory_utilization or tensor_parallel_size"
        )
    of = {role: _of_role(memory, role) for role in memory.weights} | {"rollout": memory.engine_weights + memory.cache}
    generates = memory.engine_weights > 0 and memory.generating > memory.capacity
    if not generates:
        del of["rollout"]
    largest = max(of, key=lambda role: of[role])
    phase, need = ("generating", memory.generating) if generates else ("training", memory.training)
    remedy = (
        "lower gpu_memory_utilization, or raise strategy.init_args.stage"
        if generates
        else "raise the stage, lower token_budget, or set gradient_checkpointing"
    )
    return (
        f"rank {rank} is out of memory by {_bytes(need - memory.capacity)} of {_bytes(memory.capacity)} while {phase};"
        f" `{largest}` holds {_bytes(of[largest])}: {remedy}"
    )


def _of_role(memory: Memory, role: str) -> float:
    return sum(of.get(role, 0.0) for of in (memory.weights, memory.gradients, memory.optimizer))


def _designs(simulation: Simulation) -> Iterator[str]:
    growth = simulation.growth
    yield f"tokens/s by ranks ({simulation.scaling} scaling), and the step; ! where memory is short"
    yield f"    {'ranks':>6} {'prompts':>8}" + "".join(f" {MEANING[design]:>27}" for design in DESIGNS)
    for ranks, predicted in growth.items():
        mark = " " if predicted.memory.fits else "!"
        yield f"  {mark} {ranks:>6} {predicted.workload.prompts:>8}" + _row(predicted)


def _row(predicted: Predicted) -> str:
    cells = [f"{predicted.rate(design):.4g} ({in_seconds(predicted.timelines[design].seconds)})" for design in DESIGNS]
    return "".join(f" {cell:>27}" for cell in cells)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def in_seconds(seconds: float) -> str:
    """In the unit that is read easily."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} us"


def _bytes(nbytes: float) -> str:
    for unit, size in {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}.items():
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"
