"""The tasks that a plan is made of: what they do, to which rows, and which ranks take part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rlflow.dag.node import ROLLOUT
from rlflow.values.layout import Layout


@dataclass(frozen=True)
class _InStep:
    """A task of a step, run by its `ranks`, ascending, in the one global order.

    Attributes:
        lag: How many steps behind it is: while step s is generated, a task of lag 1 works on step s - 1.
    """

    lag: int = field(default=0, kw_only=True)


class _InLayout(_InStep):
    """A task of the ranks of its layout."""

    layout: Layout

    @property
    def ranks(self) -> tuple[int, ...]:
        """The layout's."""
        return self.layout.ranks


@dataclass(frozen=True)
class Load(_InLayout):
    """Read the step's rows of the dataset, on the ranks and in the shards of their first reader, in the order drawn.

    How long they are is known only then, so a first reader that wants them balanced gets them by an exchange.
    """

    value: str
    layout: Layout

    def __str__(self) -> str:
        return f"load      {self.value}: {describe(self.layout)}"


@dataclass(frozen=True)
class SyncWeights(_InStep):
    """Bring the weights of a policy into the engines that generate with it.

    Attributes:
        policy: Whose weights.
        source: The ranks that train it, or move it as an average; none of a frozen one, which every engine reads from
            its files.
        target: The engines' ranks; those that are no source get the weights from the first that is.
        changed: How often the step has changed them before.
    """

    policy: str
    source: tuple[int, ...]
    target: tuple[int, ...]
    changed: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The sources and the engines'."""
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
    """Let the engines of a policy give back their memory, for training or for another policy's engines.

    Attributes:
        policy: Whose engines.
        ranks: The ranks of its sync, all of which know that the engines hold no weights.
    """

    policy: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"sleep     {self.policy}: {rank_ranges(self.ranks)}"


@dataclass(frozen=True)
class Tell(_InStep):
    """Tell ranks that read a value elsewhere who its rows are: their ids, lengths and places.

    Attributes:
        value: `batch`, or a node that generates.
        teller: The one rank that speaks.
        hearers: The ranks that did not make the rows and take part in later tasks with them.
    """

    value: str
    teller: int
    hearers: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The teller and the hearers."""
        return tuple(sorted((self.teller, *self.hearers)))

    def __str__(self) -> str:
        return f"tell      rows of {self.value}: {rank_ranges((self.teller,))} -> {rank_ranges(self.hearers)}"


@dataclass(frozen=True)
class Exchange(_InStep):
    """Bring a value into another layout, or prompts' rows beside the samples of `reader_space`, or both.

    Attributes:
        value: The value's name.
        reader_space: The row space in which it is read: `batch`, or the id of a rollout node.
        source: Where the value was made.
        target: Where it is read.
        columns: The fields of the value that are read there; None for all.
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
    """Call a node on the rows of its layout, then free the values that nobody reads after it.

    A value that nobody reads at all is freed by the node that makes it, once it is logged. Ranks outside `layout` keep
    what they hold of a freed value until the step ends.
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
class HoldBack(_InStep):
    """Hold back the groups with responses that were cut off: they go on with the next draw, the others go on now.

    Attributes:
        node_id: The rollout node.
        frees: Values that nobody reads after it.
        ranks: The ranks of the draw, which agree on what is held back.
    """

    node_id: str
    frees: tuple[str, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"hold      {self.node_id} where it was cut off: {rank_ranges(self.ranks)}{_frees(self.frees)}"


@dataclass(frozen=True)
class Fill(_InStep):
    """Repeat tasks on the next draw of prompts until a step's groups are there.

    They are those of a filter and its ancestors; those of a rollout node whose responses may be cut off; or both.

    Attributes:
        filter_id: The filter, whose task is the last; None where all groups are kept.
        tasks: Of one draw, in the global order.
        keeps: The values that later tasks read; of these, the rows of kept groups go on.
        ranks: The ranks of its tasks, which agree on what is kept.
    """

    filter_id: str | None
    tasks: tuple[Task, ...]
    keeps: tuple[str, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        keeps = f"; keeps {', '.join(self.keeps)}" if self.keeps else ""
        return f"fill      {self.filter_id or 'step'}: {rank_ranges(self.ranks)}{keeps}; repeats"


@dataclass(frozen=True)
class Reduce(_InStep):
    """Reduce the step's metrics over all ranks, in one collective."""

    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"reduce    metrics: {rank_ranges(self.ranks)}"


Task = Load | SyncWeights | Sleep | Tell | Exchange | RunNode | TrainNode | HoldBack | Fill | Reduce


def task_lines(tasks: Sequence[Task]) -> Iterator[str]:
    """A line for each task, those that a `Fill` repeats indented below it."""
    for task in tasks:
        behind = f"; of {task.lag} step{'s' if task.lag > 1 else ''} before" if task.lag else ""
        yield f"{task}{behind}"
        if isinstance(task, Fill):
            yield from (f"  {line}" for line in task_lines(task.tasks))


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
