"""A simulation of a config: a step at the requested size, and smaller sizes up to it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Literal

from rlflow.dag.graph import Graph
from rlflow.data.prompts import PromptData
from rlflow.errors import UserError
from rlflow.memory.estimate import Memory, memories
from rlflow.memory.role_bytes import FLOAT32, LoadedRole
from rlflow.memory.workload import Workload, workload_of
from rlflow.models.causal_lm import EMA, CausalLM, WithoutAdapters
from rlflow.models.sizes import size_of
from rlflow.module import RLModule, handles
from rlflow.run.prepare import planned, scores_held_out
from rlflow.settings import MOST_DEVICES, Place, Placed, Settings
from rlflow.simulate.costs import gather_seconds
from rlflow.simulate.designs import DESIGNS, Design, StepTimeline, scheduled, works
from rlflow.simulate.hardware import Hardware
from rlflow.storage.space import in_bytes
from rlflow.strategies.deepspeed import DeepSpeedStrategy
from rlflow.strategies.single import SingleProcess
from rlflow.trainer import Trainer
from rlflow.values.layout import Layout

Scaling = Literal["weak", "strong"]
PICTURES = (".png", ".svg", ".pdf")
SIZES = (1, 2, 4, 8)  # numbers of ranks, within a node, that are tried by `divisions`


@dataclass(frozen=True)
class PredictedStep:
    """One step at one size.

    Attributes:
        workload: Work of the step.
        hardware: Hardware of a node.
    """

    workload: Workload
    hardware: Hardware

    @cached_property
    def memories(self) -> list[Memory]:
        """Memories of ranks, in rlflow; the fullest first."""
        return memories(self.workload, self.hardware.memory)

    @cached_property
    def timelines(self) -> dict[Design, StepTimeline]:
        """The step's work in each design."""
        return {design: scheduled(works(self.workload, self.hardware, design)) for design in DESIGNS}

    @property
    def memory(self) -> Memory:
        """Memory of the fullest ranks."""
        return self.memories[0]

    def rate(self, design: Design) -> float:
        """Tokens a second: prompts and responses of the rows that are trained on."""
        return self.workload.tokens / self.timelines[design].seconds


@dataclass(frozen=True)
class Division:
    """A way to divide a model.

    Attributes:
        place: Ranks to a layer, a sequence and a layer's experts.
        hsdp_shard_size: Consecutive ranks that divide the weights, the next ones having a copy; None for all.
    """

    place: Place
    hsdp_shard_size: int | None = None

    def __str__(self) -> str:
        place = self.place
        sizes = f"{place.tensor_parallel_size} x {place.sequence_parallel_size} x {place.expert_parallel_size}"
        return sizes if self.hsdp_shard_size is None else f"{sizes}, `hsdp_shard_size: {self.hsdp_shard_size}`"


@dataclass(frozen=True)
class Simulation:
    """The prediction of a run on other machines.

    Attributes:
        module: The algorithm, its models configured.
        graph: Graph of the module.
        data: Prompts of the algorithm.
        trainer: Trainer with the strategy and the engine.
        nodes: Number of nodes to simulate.
        name: Name of the hardware.
        hardware: Hardware of a node.
        scaling: Whether the step's prompts grow with the ranks.
        prompt_tokens: Tokens of a prompt on average; None for half of the longest.
        response_tokens: Tokens of a response on average; None for half of the longest.
        on_cpu: Whether the ranks run on CPUs.
        picture: File that timelines and growth are drawn into; None for none.
        suggests: Whether the screen has the fastest divisions of the trained model.
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
    picture: Path | None = None
    suggests: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise UserError(f"`--nodes` is {self.nodes}; give 1 or more")
        if self.picture is not None and self.picture.suffix not in PICTURES:
            raise UserError(f"`--draw` is {str(self.picture)!r}; end it in one of {', '.join(PICTURES)}")

    @cached_property
    def predicted(self) -> PredictedStep:
        """The predicted step at the requested size."""
        return PredictedStep(self._workload(self.nodes), self.hardware)

    @cached_property
    def phases(self) -> list[Phase]:
        """The phases around the steps."""
        found, bucket = self.predicted, self.trainer.settings.sync_bucket_bytes
        return run_phases(found.workload, found.memories, self.hardware, bucket)

    @cached_property
    def growth(self) -> dict[int, PredictedStep]:
        """Predicted steps by ranks: at 1, 2, 4, ... nodes where the sizes divide, and at the requested size."""
        found = {}
        for power in range(self.nodes.bit_length()):
            try:
                workload = self._workload(2**power)
            except UserError:  # prompts, or updates of no whole number of samples, on so few
                continue
            found[workload.ranks] = PredictedStep(workload, self.hardware)
        return found | {self.predicted.workload.ranks: self.predicted}

    @cached_property
    def alternatives(self) -> dict[str, PredictedStep]:
        """The predicted step on the same ranks with other placements, if the config has one."""
        found, settings = {}, self.trainer.settings
        if settings.max_staleness:
            found["in step"] = self._with(settings.placement, 0)
        if settings.placement:
            with suppress(UserError):  # an engine's size may not divide all ranks
                found["all roles on all ranks"] = self._with(None, 0)
        return found

    @cached_property
    def divisions(self) -> list[tuple[Division, PredictedStep]]:
        """Ways to divide the first trained model's layers, sequences and experts that fit, the fastest first.

        Where ranks divide neither layers nor experts, nodes may hold copies of the weights.

        Raises:
            UserError: The strategy cannot divide layers.
        """
        settings, role = self.trainer.settings, self.graph.trained_roles()[0]
        assert not isinstance(self.trainer.strategy, str)  # the trainer has made it
        if self.trainer.strategy is None or not self.trainer.strategy.divides_layers:
            raise UserError("`--suggest` divides layers and experts, which only `strategy: fsdp` does; set that")
        size, written = self.predicted.workload.roles[role].size, (settings.placement or {}).get(role, Place())
        place = written if isinstance(written, Place) else Place(written)
        found = []
        for layers, sequences, experts in product(SIZES, SIZES, SIZES if size.experts else (1,)):
            if size.heads % (layers * sequences) or size.kv_heads % layers or size.experts % experts:
                continue
            if size.experts and layers > 1 and experts == 1:
                continue
            tried = replace(
                place, tensor_parallel_size=layers, sequence_parallel_size=sequences, expert_parallel_size=experts
            )
            try:
                step = self._with({**(settings.placement or {}), role: tried}, settings.max_staleness)
            except UserError:  # the ranks cannot be divided so
                continue
            widths = self._widths(step.workload.ranks) if layers == experts == 1 else [step.workload.ranks]
            for width in widths:
                within = None if width == step.workload.ranks else width
                divided = PredictedStep(_divided_within(step.workload, width), self.hardware)
                if divided.memory.fits:
                    found.append((Division(tried, within), divided))
        return sorted(found, key=lambda each: each[1].timelines["rlflow"].seconds)

    def _widths(self, ranks: int) -> list[int]:
        """Numbers of ranks that may divide weights: one node, 2, 4, ... and all."""
        nodes = (self.hardware.gpus_per_node * 2**power for power in range(self.nodes.bit_length()))
        return sorted({ranks, *(width for width in nodes if ranks % width == 0)})

    def _with(self, placement: Mapping[str, Placed] | None, max_staleness: int) -> PredictedStep:
        other = replace(self.trainer.settings, placement=placement, max_staleness=max_staleness)
        return PredictedStep(self._workload(self.nodes, other), self.hardware)

    def _workload(self, nodes: int, settings: Settings | None = None) -> Workload:
        """The work of a step on this number of nodes, which settings of the trainer may change.

        Raises:
            UserError: The sizes do not divide, a length is beyond the config's, or a model's size is unknown.
        """
        graph, trainer = self.graph, self.trainer
        settings = settings or trainer.settings
        assert not isinstance(trainer.strategy, str)  # the trainer has made it
        ranks = nodes * self.hardware.gpus_per_node
        world = settings.world_size
        share = ranks / world if self.scaling == "weak" else 1.0
        module, data = _of_size(self.module, share, ranks), copy.copy(self.data)
        data.prompts_per_step = _scaled("prompts_per_step", data.prompts_per_step, share, ranks)
        places, measures = (settings.placement or {}).values(), scores_held_out(module, data)
        if any(not isinstance(place, Place) or place.ranks is not None for place in places):
            spread = partial(_spread, world=world, ranks=ranks)
            made = planned(module, graph, settings, trainer.engine_settings, ranks, measures, spread)
        else:
            devices = math.gcd(ranks, MOST_DEVICES)
            machines = replace(settings, num_nodes=ranks // devices, devices=devices)
            made = planned(module, graph, machines, trainer.engine_settings, ranks, measures)
        policies = graph.policies()
        strategy = trainer.strategy or (SingleProcess() if world == ranks == 1 else DeepSpeedStrategy())
        if isinstance(strategy, SingleProcess) and ranks > 1:
            raise UserError(
                "`strategy` is `single`, as by default with `trainer.devices: 1` and `trainer.precision`, so one"
                f" process trains, and {ranks} ranks are simulated; give `--strategy deepspeed` or `--strategy fsdp`"
            )
        models = handles(module)
        sizes = {
            name: size_of(models[name].model, models[name].trust_remote_code)
            for name in dict.fromkeys([*graph.roles(), *policies])
        }
        for name in policies or ([made.follows] if made.follows else []):
            heads, size = sizes[name].heads, made.engines[name].tensor_parallel_size
            if heads % size:
                raise UserError(
                    f"`rollout.init_args.tensor_parallel_size` is {size}, which does not divide the model's {heads}"
                    " attention heads; use a divisor"
                )
        return workload_of(
            module,
            data,
            graph,
            made.plan,
            made.layouts,
            sizes,
            strategy,
            made.engines.own if policies else {},
            ranks=ranks,
            on_cpu=self.on_cpu,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.response_tokens,
            moves_rows=settings.balancing.mode != "off",
            shared=made.engines.shared,
        )


def _divided_within(workload: Workload, width: int) -> Workload:
    """The work where `width` consecutive ranks, or all of a role's if these are fewer, divide the role's weights."""
    roles = {
        name: replace(role, divided_over=min(width, len(role.layout.ranks))) for name, role in workload.roles.items()
    }
    return replace(workload, roles=roles)


def _of_size(module: RLModule, share: float, ranks: int) -> RLModule:
    """A copy of the module; the samples of each update are multiplied by `share`."""
    scaled, found = copy.copy(module), handles(module)
    copies = {role: copy.copy(handle) for role, handle in found.items()}
    for role, handle in copies.items():
        if handle.samples_per_update is not None:
            handle.samples_per_update = _scaled("samples_per_update", handle.samples_per_update, share, ranks)
        if isinstance(handle, WithoutAdapters | EMA):
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
    """The layouts of roles in the config's proportions: a rank of the config stands for several if there are more."""
    more, fewer = max(1, ranks // world), max(1, world // ranks)
    spread = {}
    for role, layout in placed.items():
        blocks = sorted({rank // fewer for rank in layout.ranks})
        found = tuple(block * more + place for block in blocks for place in range(more))
        whole = world * more == ranks * fewer and len(found) * fewer == len(layout.ranks) * more
        if not whole or len(found) % layout.copies or len(found) % layout.expert_parallel_size:
            raise UserError(
                f"`placement.{role}` names {len(layout.ranks)} of {world} ranks, and {ranks} ranks cannot be divided in"
                " that proportion; simulate a multiple of the config's ranks"
            )
        spread[role] = replace(layout, ranks=found, shards=len(found) // layout.copies)
    return spread


@dataclass(frozen=True)
class Phase:
    """A phase of a run.

    Attributes:
        name: `loading`, `saving` or `resuming`.
        seconds: Seconds that all ranks spend in it.
        nbytes: Bytes that the busiest node moves from or to storage.
        memory: Memory of the fullest rank, at its fullest moment.
    """

    name: str
    seconds: float
    nbytes: float
    memory: float


def run_phases(
    workload: Workload, memories: Sequence[Memory], hardware: Hardware, sync_bucket_bytes: float
) -> list[Phase]:
    """Loading, saving and resuming of a run, its roles one after the other.

    Args:
        workload: Workload of all ranks.
        memories: Memories of ranks.
        hardware: Hardware of a node; processes on it share its storage's bandwidth.
        sync_bucket_bytes: Bytes of weights gathered at a time.
    """
    own = [role for role in workload.roles.values() if role.owns]
    trained = [role for role in own if role.trained or role.averaged]
    loading = sum(_loaded_bytes(role, hardware) for role in own)
    states = sum(_state_bytes(role, hardware) for role in trained)
    saved = sum(_saved_bytes(role, hardware) for role in trained)
    gathering = sum(gather_seconds(_written_bytes(role), role.gathered_over, hardware) for role in trained)
    bandwidth = hardware.storage_bandwidth
    return [
        Phase("loading", loading / bandwidth, loading, max(memory.loading for memory in memories)),
        Phase(
            "saving", saved / bandwidth + gathering, saved, max(memory.saving(sync_bucket_bytes) for memory in memories)
        ),
        Phase(
            "resuming", (loading + states) / bandwidth, loading + states, max(memory.resuming for memory in memories)
        ),
    ]


def phase_lines(found: Sequence[Phase], capacity: float) -> Iterator[str]:
    """A table of the phases; `!` marks a rank whose memory is too small.

    Args:
        found: The phases.
        capacity: Bytes of a rank's device.
    """
    yield f"    {'phase':<10} {'takes':>11} {'memory':>9} {'a node moves':>13}"
    for phase in found:
        mark = " " if phase.memory <= capacity else "!"
        moved = in_bytes(phase.nbytes)
        yield f"  {mark} {phase.name:<10} {phase.seconds:9.1f} s {in_bytes(phase.memory):>9} {moved:>13}"


def _loaded_bytes(role: LoadedRole, hardware: Hardware) -> float:
    """Bytes that a node reads of a model's files: all, once for its ranks, or the parts of its ranks."""
    here = min(len(role.layout.ranks), hardware.gpus_per_node)
    return role.size.parameters * role.width * min(1.0, here / role.weights_over)


def _state_bytes(role: LoadedRole, hardware: Hardware) -> float:
    """Bytes that a node reads of a checkpoint: float32 weights and moments, all or its ranks' parts."""
    here = min(len(role.layout.ranks), hardware.gpus_per_node)
    return _numbers(role) * FLOAT32 * min(1.0, here / role.states_over)


def _saved_bytes(role: LoadedRole, hardware: Hardware) -> float:
    """Bytes that a node writes, as all do in parallel: the checkpoint, and the model in Hugging Face form."""
    nodes = math.ceil(len(role.layout.ranks) / hardware.gpus_per_node)
    return (_numbers(role) * FLOAT32 + _written_bytes(role)) / nodes


def _written_bytes(role: LoadedRole) -> int:
    """Bytes of the model in Hugging Face form: of its adapters alone if it has any; a moving average has no such."""
    return (role.trained if role.adapters or not role.trained else role.size.parameters) * role.width


def _numbers(role: LoadedRole) -> int:
    """Numbers in a checkpoint: weights, the moments without a copy of the weights, and moving averages."""
    return role.trained * (1 + role.moments - role.copies) + role.averaged
