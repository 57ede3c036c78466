"""What lies on a GPU, while responses are generated and while a role is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlflow.dag.tasks import Exchange
from rlflow.data.layout import Layout
from rlflow.models.logprobs import CHUNK_ELEMENTS
from rlflow.simulate.costs import Training
from rlflow.simulate.hardware import Hardware
from rlflow.simulate.sizes import ModelSize
from rlflow.simulate.workload import Workload

# Activations of a layer for a token, bytes for each number of its width, with 16 bits a number and attention that keeps
# no scores: Korthikanti et al., arXiv 2205.05198, equation 2 without its last term.
ACTIVATION_BYTES = 34
GRADIENT_BYTES = 4  # summed in float32
FLOAT32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank.

    Attributes:
        ranks: Those that hold as much.
        weights: Of each role.
        gradients: Of each trained role.
        optimizer: States of each trained role.
        activations: Of the micro-batch that takes most.
        logits: The chunk of `[tokens, vocabulary]` that is held at once, with its gradient.
        gathered: A layer's weights where they are divided, whole.
        engine_weights: Of the engine.
        cache: Keys and values that fit beside them in the engine's share.
        held: Values of the step.
        capacity: Of the GPU.
    """

    ranks: tuple[int, ...]
    weights: Mapping[str, float]
    gradients: Mapping[str, float]
    optimizer: Mapping[str, float]
    activations: float
    logits: float
    gathered: float
    engine_weights: float
    cache: float
    held: float
    capacity: float

    @property
    def kept(self) -> float:
        """What the roles hold all the time."""
        return sum(self.weights.values()) + sum(self.optimizer.values())

    @property
    def generating(self) -> float:
        """While the engine is awake."""
        return self.kept + self.held + self.engine_weights + max(self.cache, 0.0)

    @property
    def training(self) -> float:
        """While it sleeps."""
        backward = sum(self.gradients.values()) + self.activations + self.logits + self.gathered
        return self.kept + self.held + backward

    @property
    def spare(self) -> float:
        """Bytes that are left at the fullest moment; below 0 where it does not fit."""
        return min(self.capacity - max(self.generating, self.training), self.cache)

    @property
    def fits(self) -> bool:
        """Whether the GPU holds it, and the engine's share at least the weights."""
        return max(self.generating, self.training) <= self.capacity and self.cache >= 0


def memories(workload: Workload, hardware: Hardware) -> list[Memory]:
    """What ranks hold, once for those on which the same lives; the fullest first."""
    alike: dict[tuple[bool, ...], list[int]] = {}
    lives = [frozenset(role.layout.ranks) for role in workload.roles.values()] + [frozenset(workload.engine.placed)]
    for rank in range(workload.ranks):
        alike.setdefault(tuple(rank in ranks for ranks in lives), []).append(rank)
    found = [memory(workload, hardware, tuple(ranks)) for ranks in alike.values()]
    return sorted(found, key=lambda each: each.spare)


def memory(workload: Workload, hardware: Hardware, ranks: tuple[int, ...]) -> Memory:
    """What each of these ranks holds, on which the same lives."""
    own = {name: role for name, role in workload.roles.items() if role.owner is None and ranks[0] in role.layout.ranks}
    trained = {name: role for name, role in own.items() if role.training.trained}
    engine_weights, cache = 0.0, 0.0
    if workload.follows is not None and ranks[0] in workload.engine.placed:
        followed = workload.roles[workload.follows]
        engine_weights = followed.size.parameters * followed.training.width / workload.engine.ranks
        cache = workload.engine.memory_share * hardware.memory - engine_weights
    longest = workload.lengths.longest_prompt + workload.lengths.longest_response
    return Memory(
        ranks=ranks,
        weights={name: weight_bytes(role.size, role.training) for name, role in own.items()},
        gradients={name: gradient_bytes(role.training) for name, role in trained.items()},
        optimizer={name: optimizer_bytes(role.training) for name, role in trained.items()},
        activations=max(
            (activation_bytes(role.size, role.training, longest) for role in trained.values()), default=0.0
        ),
        logits=2.0 * CHUNK_ELEMENTS * FLOAT32 if own else 0.0,
        gathered=max((gathered_bytes(role.size, role.training) for role in own.values()), default=0.0),
        engine_weights=engine_weights,
        cache=cache,
        held=_held(workload, ranks[0]),
        capacity=hardware.memory,
    )


def weight_bytes(size: ModelSize, how: Training) -> float:
    """Of a role: divided at ZeRO 3."""
    return size.parameters * how.width / (how.ranks if how.stage == 3 else 1)


def gradient_bytes(how: Training) -> float:
    """Of a trained role: divided from ZeRO 2 on."""
    return how.trained * GRADIENT_BYTES / (how.ranks if how.stage >= 2 else 1)


def optimizer_bytes(how: Training) -> float:
    """Of a trained role: moments and float32 weights, divided from ZeRO 1 on; none where the CPU keeps them."""
    return 0.0 if how.offloaded else how.trained * FLOAT32 * how.moments / (how.ranks if how.stage >= 1 else 1)


def activation_bytes(size: ModelSize, how: Training, longest: float = 0) -> float:
    """Of a micro-batch: of every layer, or with checkpointing every layer's input and one layer's activations.

    A row of `longest` tokens may be above the budget, and stands alone then; peers hold their parts of it.
    """
    tokens = max(how.token_budget, longest) / how.peers
    layer = tokens * size.hidden * ACTIVATION_BYTES * how.width / 2
    if not how.checkpointing:
        return size.layers * layer
    return size.layers * tokens * size.hidden * how.width + layer


def gathered_bytes(size: ModelSize, how: Training) -> float:
    """Of the largest piece that is whole at once at ZeRO 3: an embedding or a layer."""
    if how.stage < 3:
        return 0.0
    embeddings = size.vocabulary * size.hidden
    layer = (size.parameters - embeddings * (1 if size.tied else 2)) // size.layers
    return float(max(embeddings, layer) * how.width)


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
