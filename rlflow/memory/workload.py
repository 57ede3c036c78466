"""What a step has to do at some number of ranks, and how the models lie on them: sizes, without times."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH, Node
from rlflow.dag.planner import Plan
from rlflow.models.causal_lm import Averaged, CausalLM, WithoutAdapters
from rlflow.models.handle import ModelHandle
from rlflow.models.sizes import ModelSize
from rlflow.rollout.engine import EngineMemory, RolloutEngine
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.batch import Pairs
from rlflow.values.columns import columns
from rlflow.values.cuts import Cut
from rlflow.values.layout import Layout

# Bytes of an entry; of columns that are not listed, those of float32.
WIDTHS = {"response_ids": 8, "loss_mask": 1, "lengths": 8, "finished": 1, "version": 8, "versions": 4}
WIDTHS |= {"inherited": 8, "ended": 8, "seat": 8}
FLOAT_BYTES, TOKEN_BYTES = 4, 8
SELDOM = ("experts", "segments", "turn_rewards")  # of a `Rollout`: filled where experts are replayed, or turns taken
AVERAGE_BYTES = 4  # of a number of a moving average, at least
ROW_BYTES = 256  # of a dataset's row as JSON; an assumption


@dataclass(frozen=True)
class Lengths:
    """Tokens of a row.

    Attributes:
        prompt: On average.
        response: On average.
        longest_prompt: That the config allows.
        longest_response: That the config allows.
    """

    prompt: float
    response: float
    longest_prompt: int
    longest_response: int

    @property
    def total(self) -> float:
        """Of prompt and response, on average."""
        return self.prompt + self.response


@dataclass(frozen=True)
class RoleTraining:
    """How a role's weights lie and are updated.

    Attributes:
        stage: What is divided: 0 nothing, 1 optimizer states, 2 and gradients, 3 and weights.
        ranks: Over which it is divided.
        width: Bytes of a weight in forward passes.
        trained: Parameters that are trained.
        moments: Numbers that the optimizer keeps of each, a copy of the weight in float32 included.
        checkpointing: Whether activations are computed again.
        updates: Optimizer steps of a step.
        token_budget: Tokens of a micro-batch.
        offloaded: Whether the optimizer's states lie in the CPU's memory.
        peers: Ranks that divide each sequence among them.
        summed_width: Bytes of each of the optimizer's numbers, and of a gradient that is summed up.
        bucket: Gradients that are reduced at once, in buffers of their own; 0 where each layer's are.
        masters: Whether trained weights lie in `summed_width` and are rounded to `width` for forward passes.
        live: Weights that may stay whole at ZeRO 3, beyond those of a layer.
        within: Ranks that divide weights once more among them; 0 where none do.
        weights_offloaded: Whether weights are in the CPU's memory.
        averaged_width: Bytes of each number of a moving average beside the weight that forward passes read; 0 where
            there is none.
    """

    stage: int
    ranks: int
    width: int
    trained: int
    moments: int
    checkpointing: bool
    updates: int
    token_budget: int
    offloaded: bool = False
    peers: int = 1
    summed_width: int = 4
    bucket: int = 0
    masters: bool = False
    live: int = 0
    within: int = 0
    weights_offloaded: bool = False
    averaged_width: int = 0

    @property
    def weights_over(self) -> int:
        """Ranks that divide the weights; 1 where each has all."""
        return self.ranks if self.stage == 3 else 1

    @property
    def gathered_over(self) -> int:
        """Ranks among which a layer is gathered."""
        return self.within or self.weights_over

    @property
    def gradients_over(self) -> int:
        """Ranks that divide the summed gradients."""
        return self.ranks if self.stage >= 2 else 1

    @property
    def states_over(self) -> int:
        """Ranks that divide the optimizer's states."""
        return self.ranks if self.stage >= 1 else 1


@dataclass(frozen=True)
class LoadedRole:
    """A model that is loaded.

    Attributes:
        size: Size of the model.
        training: How it lies and is updated; a frozen role has no trained parameters.
        epochs: Passes over a step's rows.
        owner: The role whose weights it uses; None for its own.
        layout: Where it lives; ranks with the same rows divide each sequence.
    """

    size: ModelSize
    training: RoleTraining
    epochs: int
    owner: str | None
    layout: Layout


@dataclass(frozen=True)
class Engine:
    """What generates.

    Attributes:
        ranks: Ranks of one engine.
        placed: On which ranks engines are.
        memory: What each takes of a rank's, beside its weights.
    """

    ranks: int
    placed: tuple[int, ...]
    memory: EngineMemory


@dataclass(frozen=True)
class Workload:
    """A step.

    Attributes:
        graph: Graph of the algorithm.
        plan: Plan of all ranks.
        ranks: How many.
        roles: By name.
        follows: The role whose weights the engine generates with.
        engines: What generates, by the role that each engine belongs to.
        policies: Models that generate and that no rank loads to score or train, by name.
        together: Roles whose engines are awake at once, for one node generates with them; others are awake alone.
        prompts: Prompts of the step.
        group_size: Samples of each prompt.
        lengths: Lengths of a row.
        moves_rows: Whether rows are balanced over ranks.
    """

    graph: Graph
    plan: Plan
    ranks: int
    roles: Mapping[str, LoadedRole]
    follows: str | None
    engines: Mapping[str, Engine]
    prompts: int
    group_size: int
    lengths: Lengths
    moves_rows: bool
    together: tuple[frozenset[str], ...] = ()
    policies: Mapping[str, LoadedRole] = field(default_factory=dict)

    def model(self, name: str) -> LoadedRole:
        """Of a role or a policy."""
        return self.roles[name] if name in self.roles else self.policies[name]

    def rows(self, space: str) -> int:
        """Of a row space in the step, as far as a graph tells.

        `group_size` for each prompt where a train node needs them; else, as of responses that only a baseline is made
        of, one for each row above; where rows are made without generating, as many as the most that they are made of.
        """
        if space == BATCH:
            return self.prompts
        node = self.graph.nodes[space]
        if node.grows:
            return max(self.rows(self.graph.space_of(value)) for value in node.reads)
        return self.prompts * self.group_size if space in self._trained_rows else self.rows(node.inside)

    @cached_property
    def _trained_rows(self) -> frozenset[str]:
        """The row spaces that train nodes stand in, those above them, and those that they are made of."""
        todo = [node.inside for node in self.graph.order if node.kind == "train"]
        found: set[str] = set()
        while todo:
            space = todo.pop()
            if space == BATCH or space in found:
                continue
            node = self.graph.nodes[space]
            made_of = [self.graph.space_of(value) for value in node.reads] if node.grows else []
            found.add(space)
            todo += [node.inside, *made_of]
        return frozenset(found)

    @property
    def tokens(self) -> float:
        """Of prompts and responses, in the rows that are trained on; a pair has two of each."""
        (train, *_) = (node for node in self.graph.order if node.kind == "train")
        return self.rows(train.space) * self.row_tokens(train)

    def row_tokens(self, node: Node) -> float:
        """That a model reads of a row in `node`."""
        paired = any(self.graph.type_of(value) is Pairs for value in node.reads)
        return self.lengths.total * (2 if paired else 1)

    def value_bytes(self, value: str, padded: bool = False, fields: Collection[str] | None = None) -> float:
        """Of a row of `value` on the wire, as packed rows or padded to the longest that the config allows.

        Args:
            value: Its name.
            padded: Whether rows are padded.
            fields: Those that travel; None for all but those that are marked `Home`.
        """
        prompt = self.lengths.longest_prompt if padded else self.lengths.prompt
        response = self.lengths.longest_response if padded else self.lengths.response
        total = 0.0
        for column in columns(self.graph.type_of(value)):
            width = WIDTHS.get(column.name, FLOAT_BYTES)
            if column.name in SELDOM or not column.sent(fields):
                continue
            if column.cut is Cut.JSON:
                total += ROW_BYTES
            elif column.cut is Cut.TOKEN:
                total += width * (0 if value == BATCH and self._samples else response)
            elif column.cut is Cut.RAGGED:
                total += TOKEN_BYTES * (1 + (prompt if column.name == "prompt_ids" else response))
            else:
                total += width
        return total

    def columns(self, value: str, fields: Collection[str] | None = None) -> int:
        """How many of `value` travel: `fields`, or all but those that are marked `Home`."""
        return sum(column.sent(fields) for column in columns(self.graph.type_of(value)))

    @property
    def _samples(self) -> bool:
        return any(node.kind == "rollout" for node in self.graph.order)


def loaded_role(
    name: str,
    models: Mapping[str, ModelHandle],
    size: ModelSize,
    strategy: TrainingStrategy,
    layout: Layout,
    samples: int,
    on_cpu: bool = False,
) -> LoadedRole:
    """A role of a module.

    Args:
        name: Name of the role.
        models: Models of the module, by role.
        size: Size of the role's model.
        strategy: Trains it.
        layout: Where it lives.
        samples: Samples of a step.
        on_cpu: Whether it is trained on the CPU, whose memory the optimizer's states are in anyway.
    """
    handle = models[name]
    optimizer = handle.optimizer
    if not isinstance(handle, CausalLM):
        size = size.with_labels(1)
    trained = 0 if optimizer is None else size.adapters(handle.lora.rank) if handle.lora else size.parameters
    owner = handle.owner if isinstance(handle, WithoutAdapters) else None
    stage = strategy.stage or 0
    width = torch.finfo(strategy.dtype).bits // 8
    within = strategy.partition_within or 0
    divides = strategy.stage is not None
    # DeepSpeed steps a float32 copy of the weights, but for float32 weights at stage 0.
    copy = divides and not strategy.holds_masters and (stage > 0 or strategy.dtype != torch.float32)
    return LoadedRole(
        size=size,
        training=RoleTraining(
            stage=stage,
            ranks=strategy.divided_over(layout),
            width=width,
            trained=trained,
            moments=0 if optimizer is None else 2 * (optimizer.name == "adamw") + copy,
            checkpointing=handle.gradient_checkpointing,
            updates=handle.epochs * math.ceil(samples / (handle.samples_per_update or samples)),
            token_budget=strategy.token_budget,
            offloaded=strategy.offload_optimizer and not on_cpu,
            peers=layout.copies,
            summed_width=4 if divides else width,
            masters=strategy.holds_masters,
            bucket=min(strategy.bucket_elements, size.largest_layer) if stage and trained else 0,
            live=strategy.live_elements or 0,
            within=within if within < len(layout.ranks) else 0,
            weights_offloaded=strategy.offload_parameters and not on_cpu,
            averaged_width=_averaged_width(strategy, width) if isinstance(handle, Averaged) else 0,
        ),
        epochs=handle.epochs,
        layout=layout,
        owner=next((role for role, other in models.items() if other is owner), None),
    )


def _averaged_width(strategy: TrainingStrategy, width: int) -> int:
    """A float32 copy of narrower weights; where trained ones are float32 themselves, what these are wider by."""
    return 0 if width >= AVERAGE_BYTES else AVERAGE_BYTES - (width if strategy.holds_masters else 0)


def engine_here(
    engine: RolloutEngine, placed: Layout, followed: LoadedRole, lengths: Lengths, rows: int, on_cpu: bool
) -> Engine:
    """What generates, and what it takes.

    Args:
        engine: As configured.
        placed: Where engines are.
        followed: The role whose weights it generates with.
        lengths: Lengths of a row.
        rows: Responses of a step.
        on_cpu: Whether it runs on the CPU.
    """
    row_bytes = (lengths.longest_prompt + lengths.longest_response) * followed.size.cache_bytes(followed.training.width)
    taken = engine.memory_taken(math.ceil(rows / placed.shards), row_bytes, on_cpu)
    return Engine(engine.tensor_parallel_size, placed.ranks, taken)
