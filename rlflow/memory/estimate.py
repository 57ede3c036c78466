"""What lies on a device, while roles are loaded and trained and responses are generated: one table of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rlflow.dag.tasks import Exchange, rank_ranges
from rlflow.errors import UserError
from rlflow.memory.workload import Engine, LoadedRole, RoleTraining, Workload
from rlflow.models.logprobs import CHUNK_ELEMENTS
from rlflow.models.sizes import ModelSize
from rlflow.storage.space import in_bytes
from rlflow.values.layout import Layout

# Activations of a layer for a token, bytes for each number of its width, with 16 bits a number and attention that keeps
# no scores: Korthikanti et al., arXiv 2205.05198, equation 2 without its last term.
ACTIVATION_BYTES = 34
FLOAT32 = 4


@dataclass(frozen=True)
class RoleBytes:
    """The bytes that a role takes of a rank: the table of which estimates of steps and of phases are sums.

    Attributes:
        size: Size of its model.
        how: How it lies and is updated.
        longest: Tokens of the longest row, which may be above the token budget and stands alone then.
        buffer: Bytes of weights that are gathered at once on their way to an engine or into a file.
    """

    size: ModelSize
    how: RoleTraining
    longest: float = 0
    buffer: float = 0

    @property
    def weights(self) -> float:
        """Weights, divided at ZeRO 3, and there once more where a node's ranks divide them too.

        Those that are trained may be wider than forward passes read them; beside those of a moving average is the
        average.
        """
        size, how = self.size, self.how
        average = size.parameters * how.averaged_width / how.states_over
        nbytes = size.parameters * how.width
        wider = how.trained * (how.summed_width - how.width) if how.masters else 0
        return (nbytes + wider) / how.weights_over + (nbytes / how.within if how.within else 0) + average

    @property
    def gradients(self) -> float:
        """Summed gradients, divided from ZeRO 2 on; before, those of the weights' dtype beside these sums."""
        how = self.how
        if how.stage >= 2:
            return how.trained * how.summed_width / how.gradients_over
        return how.trained * (how.summed_width + (how.width if how.width < how.summed_width else 0))

    @property
    def optimizer(self) -> float:
        """Moments and float32 weights, divided from ZeRO 1 on; wherever they lie."""
        return self.how.trained * self.how.summed_width * self.how.moments / self.how.states_over

    @property
    def stepping(self) -> float:
        """While AdamW steps: the root of the second moments."""
        how = self.how
        return how.trained * how.summed_width / how.states_over if how.moments >= 2 and not how.offloaded else 0.0

    @property
    def activations(self) -> float:
        """Of a micro-batch: of every layer, or with checkpointing every layer's input and one layer's activations.

        Peers hold their parts of a row.
        """
        layer = self._tokens * self.size.hidden * ACTIVATION_BYTES * self.how.width / 2
        if not self.how.checkpointing:
            return self.size.layers * layer
        return self.size.layers * self._tokens * self.size.hidden * self.how.width + layer

    @property
    def logits(self) -> float:
        """Of a micro-batch: the chunk of logits that is held at once, and its gradient."""
        return 2.0 * FLOAT32 * min(CHUNK_ELEMENTS, self._tokens * self.size.outputs)

    @property
    def gathered(self) -> float:
        """Whole at once at ZeRO 3: an embedding, a layer, or as much as may stay so; with FSDP the next one too."""
        if self.how.stage < 3:
            return 0.0
        pieces = 2 if self.how.masters else 1
        whole = max(pieces * self.size.largest_layer, self.how.live)
        return float(min(self.size.parameters, whole) * self.how.width)

    @property
    def reduced(self) -> float:
        """While gradients are reduced: those of a backward pass, the buffer, and a copy on its way.

        FSDP has no buffer and reduces a layer's gradients at once.
        """
        how = self.how
        if not how.trained or how.ranks == 1:
            return 0.0
        if how.stage == 0:  # all of them, flattened
            return float(how.trained * how.summed_width)
        if how.masters:
            return float(min(self.size.largest_layer, how.trained) * (how.width + how.summed_width))
        return float(how.bucket * (how.width + how.summed_width * (1 if how.stage == 3 else 2)))

    @property
    def keeps_buffer(self) -> bool:
        """Whether the buffer in which gradients are reduced is there between backward passes; FSDP has none."""
        return self.how.stage == 3 and not self.how.masters

    @property
    def loading(self) -> float:
        """The most while the role is loaded: whole, or from the first byte its own part and one piece."""
        how = self.how
        copied = how.moments % 2 * how.trained * how.summed_width / how.states_over  # in float32, beside the moments
        if how.stage == 3:
            return self.weights + copied + self._gradients_at_rest + self.piece
        if how.stage and how.trained:  # flattened; then the part that this rank steps is cut out, and copied
            return max(2 * self.weights, self.weights + 2 * copied)
        return self.weights + copied

    @property
    def resting(self) -> float:
        """Between steps, after the first: weights and states, and what DeepSpeed keeps at ZeRO-3."""
        states = 0.0 if self.how.offloaded else self.optimizer
        weights = 0.0 if self.how.weights_offloaded else self.weights
        return weights + states + self._gradients_at_rest + self._buffer_at_rest

    @property
    def step(self) -> float:
        """Forward and backward passes and the update, at their fullest moment."""
        passes = self.activations + self.logits + self._moved
        return self.resting + self._new_gradients + max(passes, self.stepping)

    @property
    def sync(self) -> float:
        """Weights on their way to the engine, or into a file."""
        return self.resting + min(max(self.buffer, self.piece), self.size.parameters * self.how.width)

    @property
    def resuming(self) -> float:
        """A checkpoint read again, and the update by which the optimizer makes its states."""
        updated = self.resting + self._new_gradients + max(self._moved, self.stepping) if self.how.trained else 0.0
        return max(self.loading, self.resting + self.piece, updated)

    @property
    def piece(self) -> float:
        """The largest layer or embedding."""
        return float(self.size.largest_layer * self.how.width)

    @property
    def _tokens(self) -> float:
        return max(self.how.token_budget, self.longest) / self.how.peers

    @property
    def _gradients_at_rest(self) -> float:
        return self.gradients if self.how.trained and self.keeps_buffer else 0.0

    @property
    def _new_gradients(self) -> float:
        return self.gradients - self._gradients_at_rest if self.how.trained else 0.0

    @property
    def _buffer_at_rest(self) -> float:
        return float(self.how.bucket * self.how.summed_width) if self.how.stage == 3 else 0.0

    @property
    def _moved(self) -> float:
        return self.gathered + self.reduced - self._buffer_at_rest


@dataclass(frozen=True)
class HeldByEngine:
    """Bytes that an engine takes of a rank.

    Attributes:
        weights: Its copy of the policy's.
        cache: Keys and values: as many as are set, or as fit beside the weights in the engine's share.
        asleep: What stays while it sleeps.
    """

    weights: float
    cache: float
    asleep: float = 0.0

    @property
    def awake(self) -> float:
        """While it generates."""
        return self.weights + max(self.cache, 0.0)


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank.

    Attributes:
        ranks: Those that hold as much.
        weights: Weights of each role.
        gradients: Gradients of each trained role.
        optimizer: States of each trained role.
        activations: Activations of a micro-batch of each trained role; one at a time is there.
        logits: The chunk of `[tokens, vocabulary]`, or `[tokens, labels]`, that is held at once, with its gradient.
        gathered: A layer's weights where they are divided, whole.
        reduced: Gradients on their way to other ranks.
        stepping: What the optimizer takes while it steps, beside its states.
        engines: By the role that each belongs to.
        held: Values of the step.
        capacity: Capacity of the device, for this rank.
        together: Engines that are awake at once; others are awake alone.
        host: In the CPU's memory instead: optimizer states and weights of each role that leaves them there.
    """

    ranks: tuple[int, ...]
    weights: Mapping[str, float]
    gradients: Mapping[str, float]
    optimizer: Mapping[str, float]
    activations: Mapping[str, float]
    logits: float
    gathered: float
    reduced: float
    engines: Mapping[str, HeldByEngine]
    held: float
    capacity: float
    together: tuple[frozenset[str], ...] = ()
    stepping: float = 0.0
    host: Mapping[str, float] = field(default_factory=dict)

    @property
    def kept(self) -> float:
        """What the roles hold all the time."""
        return sum(self.weights.values()) + sum(self.optimizer.values())

    @property
    def generating(self) -> float:
        """While as many engines are awake as ever are."""
        return self.kept + self.held + self.awake

    @property
    def asleep(self) -> float:
        """Of all engines, while roles are trained."""
        return sum(engine.asleep for engine in self.engines.values())

    @property
    def awake(self) -> float:
        """Of all engines, while those that take most are awake and the others sleep."""
        at_once = [frozenset({name}) for name in self.engines] + [*self.together]
        more = (sum(self.engines[name].awake - self.engines[name].asleep for name in names) for names in at_once)
        return self.asleep + max(more, default=0.0)

    @property
    def training(self) -> float:
        """While engines sleep, or wait."""
        backward = max(self.activations.values(), default=0.0) + self.reduced + self.logits + self.gathered
        return self.kept + self.held + sum(self.gradients.values()) + max(backward, self.stepping) + self.asleep

    @property
    def spare(self) -> float:
        """Bytes that are left at the fullest moment; below 0 where it does not fit."""
        caches = [engine.cache for engine in self.engines.values()]
        return min(self.capacity - max(self.generating, self.training), *(caches or [0.0]))

    @property
    def fits(self) -> bool:
        """Whether the device holds it, and each engine's share at least the weights."""
        fits = max(self.generating, self.training) <= self.capacity
        return fits and all(engine.cache >= 0 for engine in self.engines.values())


def memories(workload: Workload, capacity: float) -> list[Memory]:
    """What ranks hold, once for those on which the same lives; the fullest first.

    Args:
        workload: Workload of all ranks.
        capacity: Bytes of each rank's device.
    """
    alike: dict[tuple[bool, ...], list[int]] = {}
    lives = [frozenset(role.layout.ranks) for role in workload.roles.values()]
    lives += [frozenset(engine.placed) for engine in workload.engines.values()]
    for rank in range(workload.ranks):
        alike.setdefault(tuple(rank in ranks for ranks in lives), []).append(rank)
    found = [memory(workload, capacity, tuple(ranks)) for ranks in alike.values()]
    return sorted(found, key=lambda each: each.spare)


def memory(workload: Workload, capacity: float, ranks: tuple[int, ...]) -> Memory:
    """What each of these ranks holds, on which the same lives."""
    longest = workload.lengths.longest_prompt + workload.lengths.longest_response
    own = {
        name: RoleBytes(role.size, role.training, longest)
        for name, role in workload.roles.items()
        if role.owner is None and ranks[0] in role.layout.ranks
    }
    trained = {name: role for name, role in own.items() if role.how.trained}
    engines = {
        name: _of_engine(engine, workload.model(name), capacity)
        for name, engine in workload.engines.items()
        if ranks[0] in engine.placed
    }
    reduced = [role.reduced for role in trained.values()]
    states_away = {name for name, role in trained.items() if role.how.offloaded}
    weights_away = {name for name, role in own.items() if role.how.weights_offloaded}
    return Memory(
        ranks=ranks,
        weights={name: 0.0 if name in weights_away else role.weights for name, role in own.items()},
        gradients={name: role.gradients for name, role in trained.items()},
        optimizer={name: 0.0 if name in states_away else role.optimizer for name, role in trained.items()},
        activations={name: role.activations for name, role in trained.items()},
        logits=max((role.logits for role in own.values()), default=0.0),
        gathered=max((role.gathered for role in own.values()), default=0.0),
        # ZeRO-3 keeps its buffer, the others make it anew for each backward pass
        reduced=(sum if any(role.keeps_buffer for role in trained.values()) else max)([0.0, *reduced]),
        stepping=max((role.stepping for role in trained.values()), default=0.0),
        engines=engines,
        held=_held(workload, ranks[0]),
        capacity=capacity,
        together=tuple(names & engines.keys() for names in workload.together),
        host={
            name: (role.optimizer if name in states_away else 0.0) + (role.weights if name in weights_away else 0.0)
            for name, role in own.items()
            if name in states_away | weights_away
        },
    )


def _of_engine(engine: Engine, role: LoadedRole, capacity: float) -> HeldByEngine:
    weights = role.size.parameters * role.training.width / engine.ranks
    given = engine.memory.cache
    cache = engine.memory.share * capacity - weights if given is None else given
    asleep = {"nothing": 0.0, "weights": weights, "weights and cache": weights + cache}[engine.memory.asleep]
    return HeldByEngine(weights, cache, asleep)


def _held(workload: Workload, rank: int) -> float:
    """All values of the step that a rank makes or reads."""
    placed = workload.plan.layouts()
    lives: dict[str, set[Layout]] = {
        node.id: {placed[node.id]} for node in workload.graph.order if node.kind != "train"
    }
    for task in workload.plan.every():
        if isinstance(task, Exchange) and task.value in lives:
            lives[task.value].add(task.target)
    nbytes = 0.0
    for value, layouts in lives.items():
        whole = workload.rows(workload.graph.nodes[value].space) * workload.value_bytes(value)
        nbytes += whole * max((1 / layout.shards for layout in layouts if rank in layout.ranks), default=0.0)
    return nbytes * (1 + workload.plan.max_staleness)


def memory_lines(memory: Memory, every: bool) -> Iterator[str]:
    """What a rank holds, and what to do where it cannot; `every` if all ranks hold as much."""
    of = "a rank" if every else rank_ranges(memory.ranks)
    yield (
        f"memory of {of}: {in_bytes(memory.generating)} generating, {in_bytes(memory.training)} training,"
        f" of {in_bytes(memory.capacity)}"
    )
    for role, nbytes in memory.weights.items():
        parts = [f"weights {in_bytes(nbytes)}"]
        if role in memory.gradients:
            parts += [
                f"gradients {in_bytes(memory.gradients[role])}",
                f"optimizer {in_bytes(memory.optimizer[role])}",
                f"activations {in_bytes(memory.activations[role])}",
            ]
        if role in memory.host:
            parts.append(f"in host memory {in_bytes(memory.host[role])}")
        yield f"    {role:<10} {', '.join(parts)}"
    yield (
        f"    training   logits {in_bytes(memory.logits)}, gathered {in_bytes(memory.gathered)}, reduced"
        f" {in_bytes(memory.reduced)}; values of the step {in_bytes(memory.held)}"
    )
    for role, engine in memory.engines.items():
        of = f" of {role}" if len(memory.engines) > 1 else ""
        yield f"    {f'engine{of}':<10} weights {in_bytes(engine.weights)}, cache {in_bytes(engine.cache)}"
    if not memory.fits:
        yield f"  ! {does_not_fit(memory)}"


def does_not_fit(memory: Memory) -> str:
    """Which rank lacks how many bytes, what takes most, and what to do about it."""
    rank = memory.ranks[0]
    if short := [name for name, engine in memory.engines.items() if engine.cache < 0]:
        engine, whose = memory.engines[short[0]], f" for `{short[0]}`" if len(memory.engines) > 1 else ""
        return (
            f"rank {rank}: the share of `rollout`{whose} is {in_bytes(-engine.cache)} short of its weights of"
            f" {in_bytes(engine.weights)}: raise rollout.init_args.gpu_memory_utilization or"
            " tensor_parallel_size"
        )
    of = {role: _of_role(memory, role) for role in memory.weights}
    generates = bool(memory.engines) and memory.generating > memory.capacity
    if generates:
        of["rollout"] = memory.awake
    largest = max(of, key=lambda role: of[role])
    phase, need = ("generating", memory.generating) if generates else ("training", memory.training)
    remedy = (
        "lower gpu_memory_utilization (on the CPU kv_cache_gib, of TransformersEngine max_batch), or raise"
        " strategy.init_args.stage"
        if generates
        else "raise the stage, lower token_budget, or set gradient_checkpointing"
    )
    return (
        f"rank {rank} is out of memory by {in_bytes(need - memory.capacity)} of {in_bytes(memory.capacity)} while"
        f" {phase}; `{largest}` holds {in_bytes(of[largest])}: {remedy}"
    )


def require_room_for_engines(memory: Memory) -> None:
    """Refuse several engines that alone are more than a rank's memory; of one, `memory_lines` warns.

    Raises:
        UserError: They are; names them with their bytes.
    """
    if len(memory.engines) < 2 or memory.awake <= memory.capacity:
        return
    each = [
        f"`{role}` weights {in_bytes(engine.weights)}, cache {in_bytes(engine.cache)}, asleep {in_bytes(engine.asleep)}"
        for role, engine in memory.engines.items()
    ]
    first, second, *_ = memory.engines
    raise UserError(
        f"rank {memory.ranks[0]}: the engines of {len(each)} policies ({'; '.join(each)}) take up to"
        f" {in_bytes(memory.awake)} at once, and the rank has {in_bytes(memory.capacity)}; lower"
        " `gpu_memory_utilization` (on the CPU `kv_cache_gib`, of TransformersEngine `max_batch`) of `rollout`, or let"
        f" them use one in turns (`engines.{second}: {{share: {first}, by: turns}}`)"
    )


def _of_role(memory: Memory, role: str) -> float:
    return sum(of.get(role, 0.0) for of in (memory.weights, memory.gradients, memory.optimizer))
