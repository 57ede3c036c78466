"""A simulation of a config: a step at the size asked for, and how it grows up to there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from rlflow.dag.graph import Graph
from rlflow.data.prompts import PromptData
from rlflow.errors import UserError
from rlflow.memory.estimate import Memory, memories
from rlflow.memory.workload import Workload
from rlflow.module import RLModule
from rlflow.settings import Placed, Settings
from rlflow.simulate.designs import DESIGNS, Design, works
from rlflow.simulate.hardware import Hardware
from rlflow.simulate.run_phases import Phase, run_phases
from rlflow.simulate.timeline import StepTimeline, scheduled
from rlflow.simulate.workload import read_workload
from rlflow.trainer import Trainer

Scaling = Literal["weak", "strong"]


@dataclass(frozen=True)
class PredictedStep:
    """One step at one size.

    Attributes:
        workload: What is done.
        memories: Of ranks, in rlflow; the fullest first.
        timelines: Of each design.
    """

    workload: Workload
    memories: Sequence[Memory]
    timelines: Mapping[Design, StepTimeline]

    @property
    def memory(self) -> Memory:
        """Of the fullest ranks."""
        return self.memories[0]

    def rate(self, design: Design) -> float:
        """Tokens a second: prompts and responses of the rows that are trained on."""
        return self.workload.tokens / self.timelines[design].seconds


def predict(workload: Workload, hardware: Hardware) -> PredictedStep:
    """A step in every design."""
    timelines = {design: scheduled(works(workload, hardware, design)) for design in DESIGNS}
    return PredictedStep(workload, memories(workload, hardware.memory), timelines)


@dataclass(frozen=True)
class Simulation:
    """A config on machines that are not here.

    Attributes:
        module: The algorithm, its models configured.
        graph: Of the module.
        data: Its prompts.
        trainer: Its strategy and engine.
        nodes: To be simulated.
        name: Of the hardware.
        hardware: Of a node.
        scaling: Whether the step's prompts grow with the ranks.
        prompt_tokens: On average; None for half of the longest.
        response_tokens: On average; None for half of the longest.
        on_cpu: Whether the ranks run on CPUs.
    """

    module: RLModule
    graph: Graph
    data: PromptData
    trainer: Trainer
    nodes: int
    name: str
    hardware: Hardware
    scaling: Scaling
    prompt_tokens: float | None
    response_tokens: float | None
    on_cpu: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise UserError(f"`--nodes` is {self.nodes}; give 1 or more")

    @cached_property
    def predicted(self) -> PredictedStep:
        """At the size asked for."""
        return predict(self._workload(self.nodes), self.hardware)

    @cached_property
    def phases(self) -> list[Phase]:
        """Around the steps."""
        return run_phases(self.predicted.workload, self.hardware, self.trainer.settings.sync_bucket_bytes)

    @cached_property
    def growth(self) -> dict[int, PredictedStep]:
        """By ranks: at 1, 2, 4, ... nodes where the sizes divide, and at the size asked for."""
        found = {}
        for power in range(self.nodes.bit_length()):
            try:
                workload = self._workload(2**power)
            except UserError:  # too few prompts, or updates of no whole number of samples, on so few
                continue
            found[workload.ranks] = predict(workload, self.hardware)
        return found | {self.predicted.workload.ranks: self.predicted}

    @cached_property
    def alternatives(self) -> dict[str, PredictedStep]:
        """The same ranks with other placements, where the config has one."""
        found = {}
        settings = self.trainer.settings
        if settings.max_staleness:
            found["in step"] = self._with(settings.placement, 0)
        if settings.placement:
            found["all roles on all ranks"] = self._with(None, 0)
        return found

    def _with(self, placement: Mapping[str, Placed] | None, max_staleness: int) -> PredictedStep:
        other = replace(self.trainer.settings, placement=placement, max_staleness=max_staleness)
        return predict(self._workload(self.nodes, other), self.hardware)

    def _workload(self, nodes: int, settings: Settings | None = None) -> Workload:
        strategy = self.trainer.strategy
        assert not isinstance(strategy, str)
        return read_workload(
            self.module,
            self.graph,
            self.data,
            settings or self.trainer.settings,
            strategy,
            self.trainer.engine_settings,
            nodes * self.hardware.gpus_per_node,
            weak=self.scaling == "weak",
            on_cpu=self.on_cpu,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.response_tokens,
        )
