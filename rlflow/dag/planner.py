"""The plan: one global order of tasks, from a graph and the layouts of its roles; a rank runs those that name it.

It is a pure function of its arguments, so every rank makes the same plan, and its digest is compared before step 0.
Because all ranks issue their collectives in the one global order, collectives cannot cross.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH, ROLLOUT, Node
from rlflow.data.layout import Layout
from rlflow.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Load:
    """Read the step's rows of the dataset, on the ranks and in the shards of their first reader, in the order drawn.

    How long they are is known only then, so a first reader that wants them balanced gets them by an exchange.
    """

    value: str
    layout: Layout

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return self.layout.ranks

    def __str__(self) -> str:
        return f"load      {self.value}: {describe(self.layout)}"


@dataclass(frozen=True)
class SyncWeights:
    """Bring the weights of the trained `role` into the rollout engine."""

    role: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"sync      {self.role} -> {ROLLOUT}: {rank_ranges(self.ranks)}"


@dataclass(frozen=True)
class Exchange:
    """Bring a value into another layout, or prompts' rows beside the samples of `reader_space`, or both.

    Attributes:
        value: The value's name.
        reader_space: The row space in which it is read: `batch`, or the id of a rollout node.
        source: Where the value was made.
        target: Where it is read.
    """

    value: str
    reader_space: str
    source: Layout
    target: Layout

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the two layouts, ascending."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    def __str__(self) -> str:
        rows = f"rows of {self.reader_space}"
        return f"exchange  {self.value}: {describe(self.source)} -> {describe(self.target)}; {rows}"


@dataclass(frozen=True)
class RunNode:
    """Call a node on the rows of its layout, then free the values that nobody reads after it.

    A value that nobody reads at all is freed by the node that makes it, once it is logged. Ranks outside `layout` keep
    what they hold of a freed value until the step ends.
    """

    node_id: str
    layout: Layout
    frees: tuple[str, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return self.layout.ranks

    def __str__(self) -> str:
        return f"run       {self.node_id}: {describe(self.layout)}{_frees(self.frees)}"


@dataclass(frozen=True)
class TrainNode:
    """Train a role with the loss of a train node: epochs, mini-batches and micro-batches of its layout's rows."""

    node_id: str
    layout: Layout
    frees: tuple[str, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return self.layout.ranks

    def __str__(self) -> str:
        return f"train     {self.node_id}: {describe(self.layout)}{_frees(self.frees)}"


@dataclass(frozen=True)
class Fill:
    """Repeat the tasks of a filter and its ancestors on the next draw of prompts until a step's groups are kept.

    Attributes:
        filter_id: The filter, whose task is the last.
        tasks: Of one draw, in the global order.
        keeps: The values that later tasks read; of these, the rows of kept groups go on.
        ranks: The ranks that take part: all, which agree on what is kept.
    """

    filter_id: str
    tasks: tuple[Task, ...]
    keeps: tuple[str, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        keeps = f"; keeps {', '.join(self.keeps)}" if self.keeps else ""
        return f"fill      {self.filter_id}: {rank_ranges(self.ranks)}{keeps}; repeats"


@dataclass(frozen=True)
class Reduce:
    """Reduce the step's metrics over all ranks, in one collective."""

    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"reduce    metrics: {rank_ranges(self.ranks)}"


@dataclass(frozen=True)
class Save:
    """Save a checkpoint, at the steps where one is due."""

    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"save      checkpoint: {rank_ranges(self.ranks)}"


Task = Load | SyncWeights | Exchange | RunNode | TrainNode | Fill | Reduce | Save


@dataclass(frozen=True)
class Plan:
    """The tasks of one step, in the global order."""

    tasks: tuple[Task, ...]

    def for_rank(self, rank: int) -> tuple[Task, ...]:
        """The tasks in which `rank` takes part, in the global order."""
        return _of_rank(self.tasks, rank)

    def every(self) -> Iterator[Task]:
        """All tasks, in the global order; those that a `Fill` repeats once, after it."""
        for task in self.tasks:
            yield task
            if isinstance(task, Fill):
                yield from task.tasks

    def layouts(self) -> dict[str, Layout]:
        """Where each value is made: `batch` and the nodes, by name."""
        loaded = {task.value: task.layout for task in self.every() if isinstance(task, Load)}
        return loaded | {task.node_id: task.layout for task in self.every() if isinstance(task, RunNode | TrainNode)}

    def exchange(self, value: str, reader: Node) -> Exchange | None:
        """The exchange that brings `value` to `reader`, or None where it reads the very object that was made."""
        wanted = (value, reader.input_space, self.layouts()[reader.id])
        exchanges = (task for task in self.every() if isinstance(task, Exchange))
        return next((task for task in exchanges if (task.value, task.reader_space, task.target) == wanted), None)

    @property
    def digest(self) -> str:
        """SHA-256 of the printed plan, the same on every machine."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def __str__(self) -> str:
        return "\n".join(task_lines(self.tasks))


def plan(graph: Graph, layouts: Mapping[str, Layout], world_size: int, follows: str | None = "actor") -> Plan:
    """Plan one step.

    Args:
        graph: The checked graph.
        layouts: One for each role that the graph uses, `rollout` included.
        world_size: The number of ranks.
        follows: The trained role whose weights the rollout engine follows; None for weights that never change.

    Raises:
        UserError: `follows` is no role of the graph.
    """
    world = tuple(range(world_size))
    placed = _place(graph, layouts, world)
    tasks: list[Task] = [Load(BATCH, placed[BATCH])] if BATCH in placed else []
    filled = graph.block or graph.order
    if BATCH in placed:
        tasks += _exchanges(BATCH, graph, placed, filled)
    tasks += _runs(filled, graph, placed)
    if graph.filter is not None:
        after = graph.order[len(filled) :]
        keeps = [value for value in (BATCH, *(node.id for node in filled)) if _reads(after, value)]
        tasks = [Fill(graph.filter.id, tuple(tasks), tuple(keeps), world)]
        for value in keeps:
            tasks += _exchanges(value, graph, placed, after)
        tasks += _runs(after, graph, placed)
    if follows is not None:
        tasks = _synced(tasks, follows, graph, layouts, placed)
    return Plan((*tasks, Reduce(world), Save(world)))


def task_lines(tasks: Sequence[Task]) -> Iterator[str]:
    """A line for each task, those that a `Fill` repeats indented below it."""
    for task in tasks:
        yield str(task)
        if isinstance(task, Fill):
            yield from (f"  {line}" for line in task_lines(task.tasks))


def _place(graph: Graph, layouts: Mapping[str, Layout], world: tuple[int, ...]) -> dict[str, Layout]:
    """The layout of every node, and of `batch` where it is read."""
    placed: dict[str, Layout] = {}
    for node in graph.order:
        made = [name for name in placed if name in node.reads]  # in the order in which they are planned
        if node.role is not None:
            placed[node.id] = layouts[node.role]
        else:
            ranks = placed[made[-1]].ranks if made else world
            placed[node.id] = Layout(ranks, len(ranks))
    readers = graph.readers(BATCH)
    if not readers:
        return placed
    first = placed[readers[0].id]
    return {BATCH: Layout(first.ranks, first.shards), **placed}


def _runs(nodes: Sequence[Node], graph: Graph, placed: Mapping[str, Layout]) -> Iterator[Task]:
    """What runs these nodes, and brings what they make to those of them that read it."""
    for node in nodes:
        if node.kind == "train":
            yield TrainNode(node.id, placed[node.id], _last_reads(node, graph))
        else:
            yield RunNode(node.id, placed[node.id], _last_reads(node, graph))
            yield from _exchanges(node.id, graph, placed, nodes)


def _exchanges(value: str, graph: Graph, placed: Mapping[str, Layout], readers: Collection[Node]) -> list[Exchange]:
    """One for each pair of row space and layout in which `readers` read `value` and in which it was not made."""
    source = placed[value]
    space = graph.space_of(value)
    reads = [Exchange(value, reader.input_space, source, placed[reader.id]) for reader in _reads(readers, value)]
    return [exchange for exchange in dict.fromkeys(reads) if exchange != Exchange(value, space, source, source)]


def _reads(nodes: Collection[Node], value: str) -> list[Node]:
    return [node for node in nodes if value in node.reads]


def _synced(
    tasks: list[Task], role: str, graph: Graph, layouts: Mapping[str, Layout], placed: Mapping[str, Layout]
) -> list[Task]:
    """The tasks with a weight sync before the first that samples, or that repeats one that does."""
    for place, task in enumerate(tasks):
        runs = task.tasks if isinstance(task, Fill) else (task,)
        for run in runs:
            if isinstance(run, RunNode) and graph.nodes[run.node_id].kind == "rollout":
                return [*tasks[:place], _sync(role, layouts, run.layout), *tasks[place:]]
    return tasks


def _sync(role: str, layouts: Mapping[str, Layout], engine: Layout) -> SyncWeights:
    if role not in layouts:
        found = f"the rollout engine follows the weights of {role!r}, and no node has this role"
        raise UserError(f"{found}; the roles are {', '.join(layouts)}.{did_you_mean(role, layouts)}")
    return SyncWeights(role, tuple(sorted({*layouts[role].ranks, *engine.ranks})))


def _last_reads(node: Node, graph: Graph) -> tuple[str, ...]:
    """The values that nobody reads after `node`, its own included; a filter's own is read by what repeats it."""
    last = [name for name in node.reads if graph.readers(name)[-1] == node]
    unread = node.kind not in ("train", "filter") and not graph.readers(node.id)
    return (*last, node.id) if unread else tuple(last)


def _of_rank(tasks: tuple[Task, ...], rank: int) -> tuple[Task, ...]:
    own = (task for task in tasks if rank in task.ranks)
    return tuple(replace(task, tasks=_of_rank(task.tasks, rank)) if isinstance(task, Fill) else task for task in own)


def describe(layout: Layout) -> str:
    """`ranks 0-3, 2 shards x 2 copies, balanced in updates of 64 rows`."""
    copies = f" x {layout.copies} copies" if layout.copies > 1 else ""
    updates = f" in updates of {layout.samples_per_update} rows" if layout.samples_per_update is not None else ""
    shards = f"{layout.shards} shard{'s' if layout.shards > 1 else ''}"
    return f"{rank_ranges(layout.ranks)}, {shards}{copies}, {layout.dealing}{updates}"


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
