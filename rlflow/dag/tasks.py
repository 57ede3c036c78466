"""The tasks of a plan: what each does, to which rows, and which ranks take part. They hold names, never tensors.

`str` of a task is its line in `rlflow graph` and in the plan's digest, such as

    exchange  advantages: ranks 2-3, 2 shards, groups -> ranks 0-1, 2 shards, balanced; rows of rollout
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rlflow.dag.node import ROLLOUT
from rlflow.values.layout import Layout


@dataclass(frozen=True)
class _InStep:
    """A task of a step. Its `ranks`, ascending, run it at its place in the global order; others skip it.

    Attributes:
        lag: Number of steps by which it is behind: while step s is generated, a task of lag 1 works on step s - 1.
    """

    lag: int = field(default=0, kw_only=True)


class _InLayout(_InStep):
    """A task that the ranks of its layout run."""

    layout: Layout

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of `layout`."""
        return self.layout.ranks


@dataclass(frozen=True)
class Load(_InLayout):
    """Read the step's rows of the dataset, on the ranks and in the shards of the first node that reads them.

    Rows are in the order drawn: their lengths are known only once they are read, so a node that reads them balanced
    gets them by an exchange.
    """

    value: str
    layout: Layout

    def __str__(self) -> str:
        return f"load      {self.value}: {describe(self.layout)}"


@dataclass(frozen=True)
class SyncWeights(_InStep):
    """Bring the weights of a policy into the engines that generate with it.

    Attributes:
        policy: The policy whose weights are sent.
        source: The ranks that train the policy, or update it as an average; empty for a frozen policy, whose weights
            every engine reads from files.
        target: The engines' ranks; ranks that are not in `source` get the weights from the first rank of `source`.
        changed: Number of the step's train nodes that have changed the weights before this task.
    """

    policy: str
    source: tuple[int, ...]
    target: tuple[int, ...]
    changed: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of `source` and `target`."""
        return tuple(sorted({*self.source, *self.target}))

    def __str__(self) -> str:
        if not self.source:
            return f"sync      {self.policy} -> {ROLLOUT}: from its files, {rank_ranges(self.target)}"
        across = "" if set(self.target) <= set(self.source) else f"{rank_ranges(self.source)} -> "
        after = "; changed in this step" if self.changed else ""
        ranks = rank_ranges(self.target if across else self.ranks)
        return f"sync      {self.policy} -> {ROLLOUT}: {across}{ranks}{after}"


@dataclass(frozen=True)
class Sleep(_InStep):
    """Let the engines of a policy free their memory, for training or for another policy's engines.

    Attributes:
        policy: The policy whose engines sleep.
        ranks: The ranks of the policy's `SyncWeights`. Ranks that train the policy take part, since they must know that
            its engines have no weights.
    """

    policy: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"sleep     {self.policy}: {rank_ranges(self.ranks)}"


@dataclass(frozen=True)
class BroadcastRows(_InStep):
    """Send a row space (paths, lengths, partitions) to ranks that did not make its rows and work with them later.

    Attributes:
        value: The rows: `batch`, or the id of a node that makes rows.
        source: The rank that sends.
        receivers: The ranks that receive.
    """

    value: str
    source: int
    receivers: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The source and the receivers."""
        return tuple(sorted((self.source, *self.receivers)))

    def __str__(self) -> str:
        return f"broadcast rows of {self.value}: {rank_ranges((self.source,))} -> {rank_ranges(self.receivers)}"


@dataclass(frozen=True)
class Exchange(_InStep):
    """Send a value to the layout in which a node reads it, or repeat prompts' rows for each of their samples, or both.

    Attributes:
        value: The value's name.
        reader_space: The row space in which it is read: `batch`, or the id of a node that makes rows.
        source: The layout in which the value was made.
        target: The layout in which it is read.
        columns: The fields of the value that are read there; None for all that are not marked `OnDemand`.
    """

    value: str
    reader_space: str
    source: Layout
    target: Layout
    columns: tuple[str, ...] | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the two layouts."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    def __str__(self) -> str:
        rows = f"rows of {self.reader_space}"
        only = f"; only {', '.join(self.columns) or 'rows'}" if self.columns is not None else ""
        return f"exchange  {self.value}: {describe(self.source)} -> {describe(self.target)}; {rows}{only}"


@dataclass(frozen=True)
class RunNode(_InLayout):
    """Call a node on the rows of its layout, then free the values in `frees`, which no later node reads.

    A value that no node reads is freed by the node that makes it, once it is logged. Ranks outside `layout` hold their
    part of a freed value until the step ends.
    """

    node_id: str
    layout: Layout
    frees: tuple[str, ...]

    def __str__(self) -> str:
        return f"run       {self.node_id}: {describe(self.layout)}{_frees(self.frees)}"


@dataclass(frozen=True)
class TrainNode(_InLayout):
    """Train a role with the loss of a train node: epochs, mini-batches and micro-batches of its layout's rows."""

    node_id: str
    layout: Layout
    frees: tuple[str, ...]

    def __str__(self) -> str:
        return f"train     {self.node_id}: {describe(self.layout)}{_frees(self.frees)}"


@dataclass(frozen=True)
class DeferUnfinished(_InStep):
    """Hold back groups with unfinished responses, which the next draw of prompts continues; pass on the others.

    Attributes:
        node_id: The rollout node.
        frees: Values that no later node reads.
        ranks: The ranks of the draw, which agree on what is held back.
    """

    node_id: str
    frees: tuple[str, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"defer     {self.node_id} where it was cut off: {rank_ranges(self.ranks)}{_frees(self.frees)}"


@dataclass(frozen=True)
class DynamicSampling(_InStep):
    """Repeat tasks, each time on the next draw of prompts, until the step has all its groups.

    Repeated are a filter and its ancestors, or a rollout node with partial rollouts, or both.

    Attributes:
        filter_id: The filter, whose task is the last; None if no group is dropped.
        tasks: The tasks of one draw, in the global order.
        keeps: The values that later tasks read; they get the rows of the groups that passed the filter.
        ranks: The ranks of `tasks`, which agree on the groups that pass.
    """

    filter_id: str | None
    tasks: tuple[Task, ...]
    keeps: tuple[str, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        keeps = f"; keeps {', '.join(self.keeps)}" if self.keeps else ""
        return f"resample  {self.filter_id or 'step'}: {rank_ranges(self.ranks)}{keeps}; repeats"


@dataclass(frozen=True)
class Reduce(_InStep):
    """Reduce the step's metrics over all ranks, in one collective."""

    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"reduce    metrics: {rank_ranges(self.ranks)}"


Task = (
    Load
    | SyncWeights
    | Sleep
    | BroadcastRows
    | Exchange
    | RunNode
    | TrainNode
    | DeferUnfinished
    | DynamicSampling
    | Reduce
)


def task_lines(tasks: Sequence[Task]) -> Iterator[str]:
    """One line for each task; the tasks of a `DynamicSampling` are indented below it."""
    for task in tasks:
        behind = f"; of {task.lag} step{'s' if task.lag > 1 else ''} before" if task.lag else ""
        yield f"{task}{behind}"
        if isinstance(task, DynamicSampling):
            yield from (f"  {line}" for line in task_lines(task.tasks))


def describe(layout: Layout) -> str:
    """`ranks 0-3, 2 shards x 2 copies, balanced in updates of 64 rows`."""
    layers = f", {layout.tensor_parallel_size} to a layer" if layout.tensor_parallel_size > 1 else ""
    copies = f" x {layout.copies} copies{layers}" if layout.copies > 1 else ""
    experts = f", {layout.expert_parallel_size} to a layer's experts" if layout.expert_parallel_size > 1 else ""
    counted = f"{layout.samples_per_update} {'episodes' if layout.whole_episodes else 'rows'}"
    updates = f" in updates of {counted}" if layout.samples_per_update is not None else ""
    shards = f"{layout.shards} shard{'s' if layout.shards > 1 else ''}"
    return f"{rank_ranges(layout.ranks)}, {shards}{copies}{experts}, {layout.shard_by}{updates}"


def rank_ranges(ranks: tuple[int, ...]) -> str:
    """`rank 3`, `ranks 0-3`, `ranks 0-1,4-7`: runs of consecutive ranks, in order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _frees(values: tuple[str, ...]) -> str:
    return f"; frees {', '.join(values)}" if values else ""
