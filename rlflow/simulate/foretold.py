"""`rlflow fit --predict`: what a run will take, before its first step, and how far that was off, after its last."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlflow.data.prompts import Encoder
from rlflow.errors import UserError
from rlflow.loggers.jsonl import METRICS_FILE, read_metrics
from rlflow.memory.estimate import does_not_fit
from rlflow.models.tiny import resolve_model
from rlflow.module import handles
from rlflow.run.checks import resolved
from rlflow.run.placement import followed_role
from rlflow.run.pretrained import load_tokenizer
from rlflow.simulate.report import in_seconds, work_lines
from rlflow.simulate.simulation import Simulation

READ = 64  # rows whose prompts say how long prompts are


@dataclass(frozen=True)
class Foretold:
    """The prediction of a run on the ranks that it has.

    Attributes:
        simulation: Simulation of its own number of machines and ranks.
    """

    simulation: Simulation

    def before(self) -> Simulation:
        """Print what a step will take, with the data's own prompts; the simulation with these.

        Raises:
            UserError: A rank has not enough memory; it is named, with role and bytes.
        """
        for memory in self.simulation.predicted.memories:
            if not memory.fits:
                raise UserError(f"the run cannot fit on {self.simulation.name}: {does_not_fit(memory)}")
        simulation = with_lengths(self.simulation)
        predicted = simulation.predicted
        lengths = predicted.workload.lengths
        print(
            f"predicted on {simulation.name}: step {in_seconds(predicted.timelines['rlflow'].seconds)}, with"
            f" {lengths.prompt:.1f} + {lengths.response:.1f} tokens a row"
        )
        print("\n".join(work_lines(predicted.timelines["rlflow"])))
        return simulation

    def after(self, simulation: Simulation) -> None:
        """Print what was predicted against what the run's metrics say, for responses as long as they were."""
        folder = simulation.trainer.folder
        if (folder / METRICS_FILE).is_file():
            print("\n".join(compared(simulation, read_metrics(folder))))


def with_lengths(simulation: Simulation) -> Simulation:
    """With tokens of a row as the first rows of the data have them; of responses that are sampled, half of the most."""
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
    """Lines of predicted and measured seconds: of each node, and of the step.

    Args:
        simulation: As made before the run.
        lines: The run's metrics.
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
    of_run = simulation
    if lengths:
        of_run = replace(simulation, response_tokens=statistics.fmean(lengths))
    timeline = of_run.predicted.timelines["rlflow"]
    of = f"with responses of {statistics.fmean(lengths):.1f} tokens, as they were, " if lengths else ""
    yield f"predicted against measured, {of}{'the median of ' if len(counted) > 1 else ''}{_steps(counted)}"
    for name, span in timeline.spans.items():
        known = "sync" if span.work.kind == "sync" else name
        if known in measured:
            yield _line(known, span.work.seconds, measured[known])
    yield _line("step", timeline.seconds, measured["step"])


def _steps(counted: Sequence[Mapping[str, float | None]]) -> str:
    first, last = (f"{line['step']:.0f}" for line in (counted[0], counted[-1]))
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _line(name: str, predicted: float, measured: float) -> str:
    error = f"{predicted / measured - 1:+.0%}" if measured else ""
    return f"    {name:<24} {in_seconds(predicted):>10} {in_seconds(measured):>10} {error:>7}"
