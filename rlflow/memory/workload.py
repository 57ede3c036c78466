"""The work of a step on a number of ranks: models, engines, rows and their bytes, without times."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import torch

from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH, Node, engine_of
from rlflow.dag.planner import Plan
from rlflow.data.mixture import settings_of
from rlflow.data.prompts import PromptData
from rlflow.errors import UserError
from rlflow.memory.role_bytes import LoadedRole, loaded_role
from rlflow.models.causal_lm import CausalLM
from rlflow.models.sizes import ModelSize
from rlflow.module import RLModule, handles
from rlflow.rollout.engine import EngineMemory, RolloutEngine
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.batch import Pairs
from rlflow.values.column_kinds import ColumnKind
from rlflow.values.columns import columns
from rlflow.values.layout import Layout
from rlflow.values.truncation import NOTED

# Bytes of an entry by column. Other columns have their dtype's, or if they declare none, those of float32.
WIDTHS = {"response_ids": 8, "loss_mask": 1, "lengths": 8, "finished": 1, "version": 8, "versions": 4, "ended": 8}
FLOAT_BYTES, TOKEN_BYTES = 4, 8
ROW_BYTES = 256  # bytes of a dataset's row as JSON; an assumption


@dataclass(frozen=True)
class Lengths:
    """Tokens of a row: the average, from which seconds are computed, and the most, from which memory is computed.

    Attributes:
        prompt: Tokens of a prompt, on average.
        response: Tokens of a response, on average.
        longest_prompt: Longest prompt that the config allows.
        longest_response: Longest response that the config allows.
    """

    prompt: float
    response: float
    longest_prompt: int
    longest_response: int

    @property
    def total(self) -> float:
        """Tokens of a prompt and its response, on average."""
        return self.prompt + self.response

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response together."""
        return self.longest_prompt + self.longest_response


@dataclass(frozen=True)
class Engine:
    """A rollout engine, and the bytes that it takes on a rank. The rank's device has `capacity` bytes.

    Attributes:
        ranks: Number of ranks of one engine.
        placed: All ranks that have engines.
        weights: Bytes of a rank's part of the engine's own copy of the policy's weights.
        memory: Memory that the engine takes on a rank in addition to its weights.
    """

    ranks: int
    placed: tuple[int, ...]
    weights: float
    memory: EngineMemory

    def cache(self, capacity: float) -> float:
        """Bytes for keys and values: as set, or the engine's share without its weights; negative if nothing fits."""
        given = self.memory.cache
        return self.memory.share * capacity - self.weights if given is None else given

    def awake(self, capacity: float) -> float:
        """Bytes of the engine while it generates."""
        return self.weights + max(self.cache(capacity), 0.0)

    def asleep(self, capacity: float) -> float:
        """Bytes of the engine while it sleeps."""
        stays = self.memory.asleep
        return 0.0 if stays == "nothing" else self.weights + (self.cache(capacity) if stays != "weights" else 0.0)


@dataclass(frozen=True)
class Workload:
    """The work of all ranks in a step.

    Attributes:
        graph: Graph of the algorithm.
        plan: Plan of all ranks.
        ranks: Number of ranks.
        roles: Roles by name, in the order of loading: models that ranks score with or train, and policies.
        engines: Engines by policy.
        prompts: Number of prompts of the step.
        group_size: Number of samples of each prompt.
        lengths: Tokens of a row.
        moves_rows: Whether rows are balanced over ranks.
        share_prefixes: Whether a prompt is computed once for all of its samples on a rank.
        support: Most tokens that are stored for one token of a response, its `support`; 0 for none.
        shared: Policy whose engine another policy uses, by the policy without an engine of its own.
    """

    graph: Graph
    plan: Plan
    ranks: int
    roles: Mapping[str, LoadedRole]
    engines: Mapping[str, Engine]
    prompts: int
    group_size: int
    lengths: Lengths
    moves_rows: bool
    share_prefixes: bool
    support: int = 0
    shared: Mapping[str, str] = field(default_factory=dict)

    def rows(self, space: str) -> int:
        """The number of rows of a row space in the step, as far as the graph determines it.

        Rows that a train node needs are counted as `group_size` for each prompt. Other generated rows are counted as
        one for each row above, such as responses from which only a baseline is computed. Rows that a node makes without
        generating are counted as many as in the largest row space that the node reads.
        """
        if space == BATCH:
            return self.prompts
        node = self.graph.nodes[space]
        if node.grows:
            return max(self.rows(self.graph.space_of(value)) for value in node.reads)
        return self.prompts * self.group_size if space in self._trained_rows else self.rows(node.inside)

    @cached_property
    def _trained_rows(self) -> frozenset[str]:
        """The row spaces of train nodes, the row spaces above them, and the spaces from which their rows are made."""
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
        """Tokens of prompts and responses in the rows that are trained on; a pair has two of each."""
        (train, *_) = (node for node in self.graph.order if node.kind == "train")
        return self.rows(train.space) * self.row_tokens(train)

    def row_tokens(self, node: Node) -> float:
        """Tokens that a model reads of a row in `node`."""
        return self.lengths.total * self._responses(node)

    def _responses(self, node: Node) -> int:
        """Number of responses of a row of `node`: 2 for a pair, else 1."""
        return 2 if any(self.graph.type_of(value) is Pairs for value in node.reads) else 1

    def computed_tokens(self, node: Node, shards: int) -> float:
        """Tokens of a shard's forward passes in `node`; a prompt that samples share is counted once."""
        rows = self.rows(node.space) / shards
        if not self.share_prefixes or (node.role is not None and not self.roles[node.role].shares_prefixes):
            return rows * self.row_tokens(node)
        prompts = min(rows, max(1.0, self.prompts / shards))
        return prompts * self.lengths.prompt + rows * self.lengths.response * self._responses(node)

    def value_bytes(self, value: str, padded: bool = False, fields: Collection[str] | None = None) -> float:
        """Bytes sent for a row of `value`, as packed rows or padded to the longest that the config allows.

        Args:
            value: Name of the value.
            padded: Whether rows are padded.
            fields: Fields that are sent; None for all except those that are marked `OnDemand`.
        """
        prompt = self.lengths.longest_prompt if padded else self.lengths.prompt
        response = self.lengths.longest_response if padded else self.lengths.response
        total = 0.0
        for column in columns(self.graph.type_of(value)):
            seldom_made = column.kind is ColumnKind.RAGGED and column.entry is not None
            if column.name in NOTED and column.sent(fields):
                total += column.entry.itemsize * self.support * response
            if seldom_made or not column.sent(fields):
                continue
            dtype = column.entry if isinstance(column.entry, torch.dtype) else None
            width = WIDTHS.get(column.name, FLOAT_BYTES) if dtype is None else dtype.itemsize
            if column.kind is ColumnKind.JSON:
                total += ROW_BYTES
            elif column.kind is ColumnKind.TOKEN:
                total += width * (0 if value == BATCH and self._samples else response)
            elif column.kind is ColumnKind.RAGGED:
                total += TOKEN_BYTES * (1 + (prompt if column.name == "prompt_ids" else response))
            else:
                total += width
        return total

    def columns(self, value: str, fields: Collection[str] | None = None) -> int:
        """Number of columns of `value` that are sent; `fields` as in `value_bytes`."""
        return sum(column.sent(fields) for column in columns(self.graph.type_of(value)))

    @property
    def _samples(self) -> bool:
        return any(node.kind == "rollout" for node in self.graph.order)


def workload_of(
    module: RLModule,
    data: PromptData,
    graph: Graph,
    plan: Plan,
    layouts: Mapping[str, Layout],
    sizes: Mapping[str, ModelSize],
    strategy: TrainingStrategy,
    engines: Mapping[str, RolloutEngine],
    *,
    ranks: int,
    on_cpu: bool,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
    moves_rows: bool = False,
    shared: Mapping[str, str] = MappingProxyType({}),
    longest_response: int | None = None,
) -> Workload:
    """The work of a step of a module, by its plan.

    Args:
        module: The algorithm, its models configured.
        data: Prompts of the algorithm.
        graph: Graph of the module.
        plan: Plan of all ranks.
        layouts: Layouts of roles and engines.
        sizes: Size of each role's and each policy's model, in the order of loading.
        strategy: Strategy that divides training over ranks.
        engines: Engines that generate, by policy.
        ranks: Number of ranks.
        on_cpu: Whether ranks run on the CPU.
        prompt_tokens: Tokens of a prompt on average; None for half of the longest.
        response_tokens: Tokens of a response on average; None for half of the longest.
        moves_rows: Whether rows are balanced over ranks.
        shared: Policy whose engine another policy uses, by the policy without an engine of its own.
        longest_response: Tokens of the longest response of the data, if that is known.

    Raises:
        UserError: A length is larger than the config allows.
    """
    models, samples = handles(module), data.prompts_per_step * module.group_size
    longest = module.max_response_length
    if not graph.policies():  # that of the module is for validation alone
        longest = data.max_response_length or longest_response or max(longest, math.ceil(response_tokens or 0))
    lengths = _lengths(data.max_prompt_length, longest, prompt_tokens, response_tokens)
    roles = {
        name: loaded_role(
            models[name],
            size,
            strategy,
            layouts[name],
            samples=samples,
            longest=lengths.longest,
            on_cpu=on_cpu,
            owns=name in graph.roles(),
        )
        for name, size in sizes.items()
    }
    policies = [each for name in graph.policies() if isinstance(each := models[name], CausalLM)]
    of_datasets = [each.sampling for each in settings_of(data.train).values() if each.sampling]
    cuts = [*of_datasets, *(each.truncation for each in policies if each.notes_own_support(bool(of_datasets)))]
    return Workload(
        graph=graph,
        plan=plan,
        ranks=ranks,
        roles=roles,
        engines={
            policy: loaded_engine(
                engine, layouts[engine_of(policy)], roles[policy], lengths.longest, samples=samples, on_cpu=on_cpu
            )
            for policy, engine in engines.items()
        },
        prompts=data.prompts_per_step,
        group_size=module.group_size,
        lengths=lengths,
        moves_rows=moves_rows,
        share_prefixes=strategy.forward_plan.shares_prefixes,
        support=max((each.top_k or 0 for each in cuts), default=0),
        shared=shared,
    )


def _lengths(longest_prompt: int, longest: int, prompt: float | None, response: float | None) -> Lengths:
    for name, value, most in (("prompt_tokens", prompt, longest_prompt), ("response_tokens", response, longest)):
        if value is not None and not 0 < value <= most:
            raise UserError(f"`--{name}` is {value:g}, and the config allows up to {most} tokens; give 1 to {most}")
    return Lengths(prompt or longest_prompt / 2, response or longest / 2, longest_prompt, longest)


def loaded_engine(
    engine: RolloutEngine, placed: Layout, followed: LoadedRole, longest: int, *, samples: int, on_cpu: bool
) -> Engine:
    """A rollout engine, and the bytes that it takes on a rank.

    Args:
        engine: Engine as configured.
        placed: Layout of the policy's engines.
        followed: The role whose weights the engine has.
        longest: Tokens of the longest row.
        samples: Number of responses in a step.
        on_cpu: Whether the engine runs on the CPU.
    """
    row_bytes = longest * followed.size.cache_bytes(followed.width) + followed.size.state_bytes
    taken = engine.memory_taken(math.ceil(samples / placed.shards), row_bytes, on_cpu)
    weights = followed.size.parameters * followed.width / engine.tensor_parallel_size
    return Engine(engine.tensor_parallel_size, placed.ranks, weights, taken)
