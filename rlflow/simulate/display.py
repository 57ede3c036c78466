"""Prints a simulation as one screen, draws it, and compares the prediction of a run with measurements."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rlflow.data.prompts import Encoder
from rlflow.errors import UserError
from rlflow.loggers.jsonl import METRICS_FILE, read_metrics
from rlflow.memory.estimate import does_not_fit, memory_lines
from rlflow.models.picture_processor import PictureProcessor, reads_pictures
from rlflow.models.tiny import resolve_model
from rlflow.module import environments, handles
from rlflow.run.placement import followed_role
from rlflow.run.preflight import resolved
from rlflow.run.pretrained import load_config, load_tokenizer
from rlflow.simulate.designs import DESIGNS, MEANING, StepTimeline, node_seconds
from rlflow.simulate.simulation import Simulation, phase_lines
from rlflow.storage.space import in_bytes

SUGGESTED = 5  # divisions that are listed
READ = 64  # rows from which the length of prompts is measured


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
    if simulation.alternatives:
        yield "the same ranks, placed otherwise"
    for name, other in simulation.alternatives.items():
        seconds, mark = other.timelines["rlflow"].seconds, "" if other.memory.fits else "; does not fit"
        yield f"    {name:<24} step {in_seconds(seconds)}, {seconds / timeline.seconds:.2f} times as long{mark}"
    if simulation.alternatives:
        yield ""
    if simulation.suggests:
        yield "ranks to a layer, a sequence and a layer's experts, the fastest that fit"
        for division, other in simulation.divisions[:SUGGESTED]:
            seconds = other.timelines["rlflow"].seconds
            yield f"    {division!s:<24} step {in_seconds(seconds)}, {seconds / timeline.seconds:.2f} times as long"
        if not simulation.divisions:
            yield "    none: no division of the model fits into the memory of these ranks"
        yield ""
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


def _designs(simulation: Simulation) -> Iterator[str]:
    yield f"tokens/s by ranks ({simulation.scaling} scaling), and the step; ! where memory is short"
    yield f"    {'ranks':>6} {'prompts':>8}" + "".join(f" {MEANING[design]:>27}" for design in DESIGNS)
    for ranks, predicted in simulation.growth.items():
        mark = " " if predicted.memory.fits else "!"
        cells = [f"{predicted.rate(of):.4g} ({in_seconds(predicted.timelines[of].seconds)})" for of in DESIGNS]
        yield f"  {mark} {ranks:>6} {predicted.workload.prompts:>8}" + "".join(f" {cell:>27}" for cell in cells)


def in_seconds(seconds: float) -> str:
    """Seconds as a text: `12.3 s`, `12.3 ms` or `25.0 us`."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} us"


KINDS = ("rollout", "score", "train", "host", "sync", "exchange", "control")


def draw_simulation(simulation: Simulation, path: Path) -> None:
    """Draw the timelines of one step in each design, above the tokens a second by number of ranks.

    The suffix of `path` gives the format, and its folder is made.
    """
    # The object form: no window system, and no state shared with a user's own figures.
    from matplotlib.figure import Figure

    predicted, growth = simulation.predicted, simulation.growth
    figure = Figure(figsize=(11.0, 8.5), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    named = 0.06 * max(timeline.seconds for timeline in predicted.timelines.values())
    labelled = set[str]()
    for design, timeline in predicted.timelines.items():
        for name, work in timeline.works.items():
            rows = [f"{MEANING[design]}: {lane}" for lane in work.lanes]
            # matplotlib leaves a label that begins with `_` out of the legend
            label = "_" if work.kind in labelled else work.kind
            bars = above.barh(rows, work.seconds, 0.7, work.start, color=f"C{KINDS.index(work.kind)}", label=label)
            labelled.add(work.kind)
            if work.seconds > named:
                above.bar_label(bars, [name] * len(rows), label_type="center", fontsize=7)
    above.invert_yaxis()
    above.set_xlabel("seconds")
    above.set_title(
        f"{type(simulation.module).__name__}, {predicted.workload.ranks} ranks of {simulation.name}: a step"
    )
    above.legend(ncols=len(KINDS), loc="lower right", fontsize="small")

    for design in DESIGNS:
        below.plot(list(growth), [at.rate(design) for at in growth.values()], marker=".", label=MEANING[design])
    first, at_first = next(iter(growth.items()))
    ideal = [at_first.rate("rlflow") * ranks / first for ranks in growth]
    below.plot(list(growth), ideal, linestyle=":", color="grey", label="rlflow's rate of a rank, as at the fewest")
    below.set_xscale("log", base=2)
    below.set_yscale("log", base=2)
    below.set_xticks(list(growth), [str(ranks) for ranks in growth])
    below.set(xlabel="ranks", ylabel="tokens/s", title=f"{simulation.scaling} scaling")
    below.grid(alpha=0.3)
    below.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


@contextmanager
def prediction(simulation: Simulation) -> Iterator[None]:
    """A context for a run on rank 0: prints the predicted seconds of a step, and after the run their error.

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
        path = resolve_model(model.model, Path(scratch), "`model`")
        tokenizer = load_tokenizer(path, model.trust_remote_code)
        config = load_config(path, model.trust_remote_code)
        processor = PictureProcessor.load(path, config, tokenizer) if reads_pictures(config) else None
    data = resolved(data, module, graph)
    rows = list(range(min(READ, len(data.train))))
    found = list(environments(module).values())
    environment = found[0] if len(found) == 1 else None
    examples = Encoder(data, tokenizer, environment, processor)(data.train, rows)
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
    first, last = (f"{line['step']:.0f}" for line in (counted[0], counted[-1]))
    steps_counted = f"step {first}" if first == last else f"the median of steps {first} to {last}"
    yield f"predicted against measured, {of}{steps_counted}"
    timeline = simulation.predicted.timelines["rlflow"]
    for name, seconds in (node_seconds(timeline.works.values()) | {"step": timeline.seconds}).items():
        if name in measured:
            error = f"{seconds / measured[name] - 1:+.0%}" if measured[name] else ""
            yield f"    {name:<24} {in_seconds(seconds):>10} {in_seconds(measured[name]):>10} {error:>7}"
