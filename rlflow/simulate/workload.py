"""What a step has to do at some number of ranks: graph, plan and sizes, read from a config's objects."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH, ROLLOUT, Node
from rlflow.dag.planner import Plan, plan
from rlflow.data.batch import Cut, Pairs, columns
from rlflow.data.layout import Layout
from rlflow.data.prompts import PromptData
from rlflow.errors import UserError
from rlflow.models.causal_lm import WithoutAdapters
from rlflow.module import RLModule
from rlflow.placement import Machines, followed_role, handles, layouts
from rlflow.preparation import read_graph
from rlflow.simulate.costs import Training
from rlflow.simulate.sizes import ModelSize, size_of
from rlflow.strategies.deepspeed import DeepSpeedStrategy
from rlflow.strategies.single import SingleProcess
from rlflow.trainer import Trainer

# Bytes of an entry; of columns that are not listed, those of float32.
WIDTHS = {"response_ids": 8, "loss_mask": 1, "lengths": 8, "finished": 1, "group": 8, "version": 8, "versions": 4}
FLOAT_BYTES, TOKEN_BYTES = 4, 8
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
class SimulatedRole:
    """A model that is loaded.

    Attributes:
        size: Of the model.
        training: How it lies and is updated; a frozen role has no trained parameters.
        epochs: Passes over a step's rows.
        owner: The role whose weights it uses; None for its own.
        layout: Where it lives; ranks with the same rows divide each sequence.
    """

    size: ModelSize
    training: Training
    epochs: int
    owner: str | None
    layout: Layout


@dataclass(frozen=True)
class Engine:
    """What generates.

    Attributes:
        ranks: Of one engine.
        memory_share: Of a GPU's memory that it takes.
        at_once: Responses that are generated at once, at most.
        placed: On which ranks engines are.
    """

    ranks: int
    memory_share: float
    at_once: float
    placed: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """A step.

    Attributes:
        graph: Of the algorithm.
        plan: Of all ranks.
        ranks: How many.
        roles: By name.
        follows: The role whose weights the engine generates with.
        engine: What generates.
        prompts: Of the step.
        group_size: Samples of each prompt.
        lengths: Of a row.
        moves_rows: Whether rows are balanced over ranks.
    """

    graph: Graph
    plan: Plan
    ranks: int
    roles: Mapping[str, SimulatedRole]
    follows: str | None
    engine: Engine
    prompts: int
    group_size: int
    lengths: Lengths
    moves_rows: bool

    def rows(self, space: str) -> int:
        """Of a row space in the step."""
        return self.prompts if space == BATCH else self.prompts * self.group_size

    @property
    def tokens(self) -> float:
        """Of prompts and responses, in the rows that are trained on; a pair has two of each."""
        (train, *_) = (node for node in self.graph.order if node.kind == "train")
        return self.rows(train.space) * self.row_tokens(train)

    def row_tokens(self, node: Node) -> float:
        """That a model reads of a row in `node`."""
        paired = any(self.graph.type_of(value) is Pairs for value in node.reads if value == BATCH)
        return self.lengths.total * (2 if paired else 1)

    def value_bytes(self, value: str, padded: bool = False, fields: Collection[str] | None = None) -> float:
        """Of a row of `value` on the wire, as packed rows or padded to the longest that the config allows.

        Args:
            value: Its name.
            padded: Whether rows are padded.
            fields: Those that travel; None for all.
        """
        prompt = self.lengths.longest_prompt if padded else self.lengths.prompt
        response = self.lengths.longest_response if padded else self.lengths.response
        total = 0.0
        for column in columns(self.graph.type_of(value)):
            width = WIDTHS.get(column.name, FLOAT_BYTES)
            if column.home or column.cut is Cut.SCALAR or (fields is not None and column.name not in fields):
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
        """How many of `value` travel, of `fields` or of all."""
        every = [column for column in columns(self.graph.type_of(value)) if fields is None or column.name in fields]
        return sum(not column.home and column.cut is not Cut.SCALAR for column in every)

    @property
    def _samples(self) -> bool:
        return any(node.kind == "rollout" for node in self.graph.order)


def read_workload(
    module: RLModule,
    data: PromptData,
    trainer: Trainer,
    ranks: int,
    *,
    weak: bool,
    prompt_tokens: float | None,
    response_tokens: float | None,
) -> Workload:
    """The step of a config on `ranks` ranks.

    Args:
        module: The algorithm.
        data: Its prompts; only their number and lengths are read.
        trainer: Its strategy, engine and number of ranks.
        ranks: To be simulated.
        weak: Whether the step's prompts and updates grow with the ranks; else they are the config's.
        prompt_tokens: Of a prompt on average; None for half of what the config allows.
        response_tokens: Of a response on average; None for half of what the config allows.

    Raises:
        UserError: The sizes do not divide, a length is beyond the config's, or a model's size is unknown.
    """
    graph = read_graph(module)
    engine = trainer.rollout
    tensor_parallel_size = 1 if engine is None else engine.tensor_parallel_size
    share = ranks / (trainer.devices * trainer.num_nodes) if weak else 1.0
    for handle in handles(module).values():
        if handle.samples_per_update is not None:
            handle.samples_per_update = _scaled("samples_per_update", handle.samples_per_update, share, ranks)
    placed = _placed(module, graph, trainer, ranks, tensor_parallel_size)
    prompts = _scaled("prompts_per_step", data.prompts_per_step, share, ranks)
    follows = followed_role(module, graph)
    smallest = placed[ROLLOUT].shards if follows and ROLLOUT in graph.roles() else ranks
    if prompts < smallest:
        raise UserError(
            f"`data.prompts_per_step` is {prompts} for {smallest} shards on {ranks} ranks, so some would have nothing"
            " to do; raise it, or simulate fewer nodes"
        )
    samples = prompts * module.group_size
    roles = {name: _role(module, name, trainer, placed[name], samples) for name in graph.roles() if name != ROLLOUT}
    followed = roles[follows].size if follows else None
    if followed and followed.heads % tensor_parallel_size:
        raise UserError(
            f"`rollout.init_args.tensor_parallel_size` is {tensor_parallel_size}, which does not divide the model's"
            f" {followed.heads} attention heads; use a divisor"
        )
    longest = data.max_response_length if ROLLOUT not in graph.roles() else module.max_response_length
    return Workload(
        graph=graph,
        plan=plan(graph, placed, ranks, follows, trainer.max_staleness, trainer.partial_rollout is not None),
        ranks=ranks,
        roles=roles,
        follows=follows if ROLLOUT in graph.roles() else None,
        engine=Engine(
            tensor_parallel_size,
            getattr(engine, "gpu_memory_utilization", 0.5),
            getattr(engine, "max_num_seqs", math.inf),
            placed[ROLLOUT].ranks,
        ),
        prompts=prompts,
        group_size=module.group_size,
        lengths=_lengths(data.max_prompt_length, longest or module.max_response_length, prompt_tokens, response_tokens),
        moves_rows=trainer.balance.mode != "off",
    )


def _scaled(name: str, size: int, share: float, ranks: int) -> int:
    scaled = size * share
    if abs(scaled - round(scaled)) > 1e-9 or round(scaled) < 1:
        raise UserError(
            f"`{name}` is {size}, which on {ranks} ranks would be {scaled:g}, in proportion to the config's ranks;"
            " choose `--nodes` that divide it, or give `--scaling strong`"
        )
    return round(scaled)


def _placed(
    module: RLModule, graph: Graph, trainer: Trainer, ranks: int, tensor_parallel_size: int
) -> dict[str, Layout]:
    """Where roles live: as the config places them, each of its ranks standing for as many as there are more."""
    if not trainer.placement:
        return layouts(module, graph, Machines(1, ranks), tensor_parallel_size)
    machines = Machines(trainer.num_nodes, trainer.devices)
    written = layouts(module, graph, machines, tensor_parallel_size, trainer.placement)
    return {role: _spread(role, layout, machines.world_size, ranks) for role, layout in written.items()}


def _spread(role: str, layout: Layout, world: int, ranks: int) -> Layout:
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


def _role(module: RLModule, name: str, trainer: Trainer, layout: Layout, samples: int) -> SimulatedRole:
    handle = handles(module)[name]
    size = size_of(handle.model)
    world = trainer.devices * trainer.num_nodes
    strategy: Any = trainer.strategy or (
        SingleProcess() if world == 1 and len(layout.ranks) == 1 else DeepSpeedStrategy()
    )
    optimizer = handle.optimizer
    trained = 0 if optimizer is None else size.adapters(handle.lora.rank) if handle.lora else size.parameters
    owner = handle.owner if isinstance(handle, WithoutAdapters) else None
    return SimulatedRole(
        size=size,
        training=Training(
            stage=getattr(strategy, "stage", 0),
            ranks=len(layout.ranks),
            width=torch.finfo(strategy.dtype).bits // 8,
            trained=trained,
            # Adam's two, and float32 weights beside those of bfloat16
            moments=0 if optimizer is None else 2 * (optimizer.name == "adamw") + (strategy.dtype == torch.bfloat16),
            checkpointing=handle.gradient_checkpointing,
            updates=handle.epochs * math.ceil(samples / (handle.samples_per_update or samples)),
            token_budget=strategy.token_budget,
            offloaded=getattr(strategy, "offload_optimizer", False),
            peers=layout.copies,
        ),
        epochs=handle.epochs,
        layout=layout,
        owner=next((role for role, other in handles(module).items() if other is owner), None),
    )
