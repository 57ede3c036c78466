"""A simulation of a config: a step at the size asked for, and how it grows up to there."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

from rlflow.dag.graph import Graph
from rlflow.dag.node import engine_of
from rlflow.data.prompts import PromptData
from rlflow.errors import UserError
from rlflow.memory.estimate import FLOAT32, Memory, RoleBytes, memories
from rlflow.memory.workload import Lengths, LoadedRole, Workload, engine_here, loaded_role
from rlflow.models.causal_lm import Averaged, CausalLM, WithoutAdapters
from rlflow.models.sizes import size_of
from rlflow.module import RLModule, handles
from rlflow.run.prepare import planned
from rlflow.settings import MOST_DEVICES, Placed, Settings
from rlflow.simulate.costs import gather_seconds
from rlflow.simulate.designs import DESIGNS, Design, StepTimeline, scheduled, works
from rlflow.simulate.hardware import Hardware
from rlflow.storage.space import in_bytes
from rlflow.strategies.deepspeed import DeepSpeedStrategy
from rlflow.strategies.single import SingleProcess
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.trainer import Trainer
from rlflow.values.layout import Layout

Scaling = Literal["weak", "strong"]


@dataclass(frozen=True)
class PredictedStep:
    """One step at one size.

    Attributes:
        workload: What is done.
        memories: Memories of ranks, in rlflow; the fullest first.
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
        graph: Graph of the module.
        data: Its prompts.
        trainer: Its strategy and engine.
        nodes: To be simulated.
        name: Name of the hardware.
        hardware: Hardware of a node.
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
        """The step on so many nodes, which settings of the trainer may change.

        Raises:
            UserError: The sizes do not divide, a length is beyond the config's, or a model's size is unknown.
        """
        graph, data, trainer = self.graph, self.data, self.trainer
        settings = settings or trainer.settings
        assert not isinstance(trainer.strategy, str)  # the trainer has made it
        ranks = nodes * self.hardware.gpus_per_node
        world = settings.machines.world_size
        share = ranks / world if self.scaling == "weak" else 1.0
        module = _of_size(self.module, share, ranks)
        prompts = _scaled("prompts_per_step", data.prompts_per_step, share, ranks)
        if settings.placement:
            spread = partial(_spread, world=world, ranks=ranks)
            made = planned(module, graph, settings, trainer.engine_settings, ranks, spread)
        else:
            devices = math.gcd(ranks, MOST_DEVICES)
            machines = replace(settings, num_nodes=ranks // devices, devices=devices)
            made = planned(module, graph, machines, trainer.engine_settings, ranks)
        placed, assigned = made.layouts, made.engines
        smallest = min((placed[engine_of(name)].shards for name in graph.policies()), default=ranks)
        if prompts < smallest:
            raise UserError(
                f"`data.prompts_per_step` is {prompts} for {smallest} shards on {ranks} ranks, so some would have"
                " nothing to do; raise it, or simulate fewer nodes"
            )
        samples = prompts * module.group_size
        models = handles(module)
        roles = {
            name: loaded_role(
                name,
                models,
                size_of(models[name].model, models[name].trust_remote_code),
                trainer.strategy or _default_strategy(world, placed[name]),
                placed[name],
                samples,
                self.on_cpu,
            )
            for name in dict.fromkeys([*graph.roles(), *graph.policies()])
        }
        policies = {name: roles.pop(name) for name in graph.policies() if name not in graph.roles()}
        for name in graph.policies() or ([made.follows] if made.follows else []):
            heads, size = (roles | policies)[name].size.heads, assigned[name].tensor_parallel_size
            if heads % size:
                raise UserError(
                    f"`rollout.init_args.tensor_parallel_size` is {size}, which does not divide the model's {heads}"
                    " attention heads; use a divisor"
                )
        longest = module.max_response_length if graph.policies() else data.max_response_length
        longest = longest or module.max_response_length
        lengths = _lengths(data.max_prompt_length, longest, self.prompt_tokens, self.response_tokens)
        generates = next(iter(graph.policies()), None)
        return Workload(
            graph=graph,
            plan=made.plan,
            ranks=ranks,
            roles=roles,
            follows=generates,
            engines={
                name: engine_here(
                    engine, placed[engine_of(name)], (roles | policies)[name], lengths, samples, self.on_cpu
                )
                for name, engine in assigned.own.items()
                if generates
            },
            prompts=prompts,
            group_size=module.group_size,
            lengths=lengths,
            moves_rows=settings.balancing.mode != "off",
            policies=policies,
        )


def _of_size(module: RLModule, share: float, ranks: int) -> RLModule:
    """A copy whose updates have so many times the samples."""
    scaled, found = copy.copy(module), handles(module)
    copies = {role: copy.copy(handle) for role, handle in found.items()}
    for role, handle in copies.items():
        if handle.samples_per_update is not None:
            handle.samples_per_update = _scaled("samples_per_update", handle.samples_per_update, share, ranks)
        if isinstance(handle, WithoutAdapters | Averaged):
            owner = next(copies[name] for name, other in found.items() if other is handle.owner)
            assert isinstance(owner, CausalLM)
            handle.owner = owner
        setattr(scaled, role, handle)
    return scaled


def _scaled(name: str, size: int, share: float, ranks: int) -> int:
    scaled = size * share
    if abs(scaled - round(scaled)) > 1e-9 or round(scaled) < 1:
        raise UserError(
            f"`{name}` is {size}, which on {ranks} ranks would be {scaled:g}, in proportion to the config's ranks;"
            " choose `--nodes` that divide it, or give `--scaling strong`"
        )
    return round(scaled)


def _spread(placed: Mapping[str, Layout], *, world: int, ranks: int) -> dict[str, Layout]:
    """Where roles live: as the config places them, each of its ranks standing for as many as there are more."""
    return {role: _spread_role(role, layout, world, ranks) for role, layout in placed.items()}


def _spread_role(role: str, layout: Layout, world: int, ranks: int) -> Layout:
    more, fewer = max(1, ranks // world), max(1, world // ranks)
    spread = tuple(
        sorted({place for rank in layout.ranks for place in range(rank // fewer * more, (rank // fewer + 1) * more)})
    )
    if world * more != ranks * fewer or len(spread) * fewer != len(layout.ranks) * more or len(spread) % layout.copies:
        raise UserError(
            f"`placement.{role}` names {len(layout.ranks)} of {world} ranks, of which {ranks} cannot be made in"
            " proportion; simulate a multiple of the config's ranks"
        )
    return replace(layout, ranks=spread, shards=len(spread) // layout.copies)


def _lengths(longest_prompt: int, longest: int, prompt: float | None, response: float | None) -> Lengths:
    for name, value, most in (("prompt_tokens", prompt, longest_prompt), ("response_tokens", response, longest)):
        if value is not None and not 0 < value <= most:
            raise UserError(f"`--{name}` is {value:g}, and the config allows up to {most} tokens; give 1 to {most}")
    return Lengths(prompt or longest_prompt / 2, response or longest / 2, longest_prompt, longest)


def _default_strategy(world: int, layout: Layout) -> TrainingStrategy:
    return SingleProcess() if world == 1 and len(layout.ranks) == 1 else DeepSpeedStrategy()


@dataclass(frozen=True)
class Phase:
    """A phase of a run.

    Attributes:
        name: `loading`, `saving` or `resuming`.
        seconds: For which all ranks are at it.
        nbytes: That the node which moves most moves from or to storage.
        memory: Memory of the fullest rank, at its fullest moment.
    """

    name: str
    seconds: float
    nbytes: float
    memory: float


def run_phases(workload: Workload, hardware: Hardware, buffer: float) -> list[Phase]:
    """Of a run, its roles one after the other.

    Args:
        workload: Workload of all ranks.
        hardware: Hardware of a node; processes on it share its storage's bandwidth.
        buffer: Bytes of weights gathered at once.
    """
    own = [role for role in workload.roles.values() if role.owner is None]
    trained = [role for role in own if role.training.trained]
    loading = sum(_loaded_bytes(role, hardware) for role in own)
    states = sum(_state_bytes(role, hardware) for role in trained)
    saved = sum(_saved_bytes(role, hardware) for role in trained)
    gathering = sum(
        gather_seconds(role.size.parameters * role.training.width, role.training.gathered_over, hardware)
        for role in trained
    )
    bandwidth = hardware.storage_bandwidth
    fullest = [_memory(workload, rank, buffer) for rank in _unlike(workload)]
    return [
        Phase("loading", loading / bandwidth, loading, max(loading for loading, _, _ in fullest)),
        Phase("saving", saved / bandwidth + gathering, saved, max(saving for _, saving, _ in fullest)),
        Phase(
            "resuming",
            (loading + states) / bandwidth,
            loading + states,
            max(resuming for _, _, resuming in fullest),
        ),
    ]


def phase_lines(found: Sequence[Phase], capacity: float) -> Iterator[str]:
    """A table; `!` where a rank's memory does not take it."""
    yield f"    {'phase':<10} {'takes':>11} {'memory':>9} {'a node moves':>13}"
    for phase in found:
        mark = " " if phase.memory <= capacity else "!"
        moved = in_bytes(phase.nbytes)
        yield f"  {mark} {phase.name:<10} {phase.seconds:9.1f} s {in_bytes(phase.memory):>9} {moved:>13}"


def _memory(workload: Workload, rank: int, buffer: float) -> tuple[float, float, float]:
    """Loading, saving and resuming of a rank: what is loaded stays, and each role in its turn takes more."""
    longest = workload.lengths.longest_prompt + workload.lengths.longest_response
    lies = loading = rests = saving = resuming = 0.0
    for role in workload.roles.values():
        if role.owner is not None or rank not in role.layout.ranks:
            continue
        of_role = RoleBytes(role.size, role.training, longest, buffer)
        loading = max(loading, lies + of_role.loading)
        lies += of_role.loading - (of_role.piece if role.training.stage == 3 else 0)
        saving = max(saving, of_role.sync - of_role.resting)
        resuming = max(resuming, of_role.resuming - of_role.resting)
        rests += of_role.resting
    return loading, rests + saving, rests + resuming


def _unlike(workload: Workload) -> list[int]:
    """A rank for each set of roles that live together."""
    alike: dict[tuple[bool, ...], int] = {}
    for rank in range(workload.ranks):
        alike.setdefault(tuple(rank in role.layout.ranks for role in workload.roles.values()), rank)
    return list(alike.values())


def _nodes(role: LoadedRole, hardware: Hardware) -> int:
    return math.ceil(len(role.layout.ranks) / hardware.gpus_per_node)


def _loaded_bytes(role: LoadedRole, hardware: Hardware) -> float:
    """That a node reads of a model's files: all, once for its ranks, or the parts of its ranks."""
    here = min(len(role.layout.ranks), hardware.gpus_per_node)
    whole = role.size.parameters * role.training.width
    return whole * min(1.0, here / role.training.weights_over)


def _state_bytes(role: LoadedRole, hardware: Hardware) -> float:
    """That a node reads of a checkpoint: float32 weights and moments, all or its ranks' parts."""
    how, here = role.training, min(len(role.layout.ranks), hardware.gpus_per_node)
    numbers = how.trained * (1 + how.moments // 2 * 2)
    return numbers * FLOAT32 * min(1.0, here / how.states_over)


def _saved_bytes(role: LoadedRole, hardware: Hardware) -> float:
    """That a node writes, all at once and equally much: the checkpoint, and the model in Hugging Face form."""
    how = role.training
    numbers = how.trained * (1 + how.moments // 2 * 2)
    return (numbers * FLOAT32 + role.size.parameters * how.width) / _nodes(role, hardware)
