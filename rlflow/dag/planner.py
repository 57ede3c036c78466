"""The plan: one global order of tasks, from a graph and the layouts of its roles; a rank runs those that name it.

It is a pure function of its arguments, so every rank makes the same plan, and its digest is compared before step 0.
Because all ranks issue their collectives in the one global order, collectives cannot cross.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH, ROLLOUT, Node, engine_of
from rlflow.dag.node_layouts import node_layouts
from rlflow.dag.order import with_ancestors
from rlflow.dag.tasks import (
    Exchange,
    Fill,
    HoldBack,
    Load,
    Reduce,
    RunNode,
    Sleep,
    SyncWeights,
    Task,
    Tell,
    TrainNode,
    rank_ranges,
    task_lines,
)
from rlflow.errors import UserError
from rlflow.values.layout import Layout


@dataclass(frozen=True)
class Plan:
    """The tasks of one step, in the global order; where steps overlap, those of one slot of time.

    Attributes:
        tasks: A task of lag n works on the step n before that of the tasks without lag.
        max_staleness: How many steps generation runs ahead of training: the largest lag.
    """

    tasks: tuple[Task, ...]
    max_staleness: int = 0

    def for_rank(self, rank: int) -> tuple[Task, ...]:
        """The tasks in which `rank` takes part, in the global order."""
        return _of_rank(self.tasks, rank)

    def every(self) -> Iterator[Task]:
        """All tasks, in the global order; those that a `Fill` repeats once, after it."""
        for task in self.tasks:
            yield task
            if isinstance(task, Fill):
                yield from task.tasks

    @property
    def fill(self) -> Fill | None:
        """What draws prompts as often as it needs to, if anything does."""
        return next((task for task in self.tasks if isinstance(task, Fill)), None)

    @property
    def cuts_off(self) -> bool:
        """Whether long responses are cut off, and go on with the next draw of prompts."""
        return any(isinstance(task, HoldBack) for task in self.every())

    def groups(self) -> list[tuple[int, ...]]:
        """The sets of ranks that meet in collectives of the plan, each once."""
        return list(dict.fromkeys(task.ranks for task in self.every()))

    def crossing(self) -> tuple[Task, ...]:
        """What brings the values of the ranks that run ahead to those that train; none where nothing runs ahead."""
        lags = [task.lag for task in self.tasks]
        if not any(lags):
            return ()
        trains = max(place for place, task in enumerate(self.tasks) if task.lag and not isinstance(task, Reduce))
        return tuple(task for task in self.tasks[trains:] if not task.lag)

    def layouts(self) -> dict[str, Layout]:
        """Where each value is made: `batch` and the nodes, by name."""
        loaded = {task.value: task.layout for task in self.every() if isinstance(task, Load)}
        return loaded | {task.node_id: task.layout for task in self.every() if isinstance(task, RunNode | TrainNode)}

    def exchange(self, value: str, reader: Node, rows: str) -> Exchange | None:
        """The exchange that brings `value` to `reader`, or None where it reads the very object that was made.

        Args:
            value: Its name.
            reader: The node.
            rows: In which the node sees it.
        """
        found = (task for task in self.every() if isinstance(task, Exchange) and task.value == value)
        there = (task for task in found if task.target == self.layouts()[reader.id])
        return next((task for task in there if task.reader_space == rows), None)

    @property
    def digest(self) -> str:
        """SHA-256 of the printed plan, the same on every machine."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def __str__(self) -> str:
        return "\n".join(task_lines(self.tasks))


def plan(
    graph: Graph,
    layouts: Mapping[str, Layout],
    world_size: int,
    max_staleness: int = 0,
    cuts_off: bool = False,
    shared: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """Plan one step, or one slot of overlapping steps.

    With `max_staleness` N, ranks that train no role run N steps ahead of those that do: what they make of step s goes
    over when they have made it, and step s is trained on while they work on step s + N.

    Args:
        graph: The checked graph.
        layouts: One for each role that the graph uses, and by `engine_of` for each policy.
        world_size: The number of ranks.
        max_staleness: How many steps generation runs ahead.
        cuts_off: Whether long responses are cut off, and go on with the next draw of prompts.
        shared: Of each policy that takes turns in the engine of another, that other.

    Raises:
        UserError: Policies of one node are on different ranks, nothing can run ahead, or responses cannot be cut off.
    """
    world = tuple(range(world_size))
    placed = node_layouts(graph, layouts, world)
    begins = _continued_node(graph) if cuts_off else None
    if begins is not None:
        placed[BATCH] = placed[begins.id]  # so that prompts lie where their responses are kept
    ahead, behind = _ahead_of_training(graph, placed) if max_staleness else (graph.order, ())
    if begins is not None:
        ahead = (begins, *(node for node in ahead if node != begins))
    repeated = graph.block or tuple(node for node in graph.order if node == begins)
    block = [node for node in ahead if node in repeated]
    after = [node for node in ahead if node not in repeated]
    if len(block) < len(repeated):
        raise UserError(
            f"`trainer.max_staleness` is {max_staleness}, and the filter `{graph.block[-1].id}` needs"
            f" `{next(node.id for node in graph.block if node not in block)}`, which runs on ranks that train;"
            " place its role on others, or set `max_staleness: 0`"
        )
    of_nodes = _NodeTasks(graph, placed, _frees([*ahead, *behind], graph))
    tasks: list[Task] = [Load(BATCH, placed[BATCH])] if BATCH in placed else []
    made = [BATCH] if BATCH in placed else []
    if block:
        tasks += of_nodes.held_back(block) if begins is not None else of_nodes.run(block, made)
        members = tuple(sorted({rank for task in tasks for rank in task.ranks}))
        made = [value for value in (BATCH, *(node.id for node in block)) if _reads([*after, *behind], value)]
        filter_id = None if graph.filter is None else graph.filter.id
        tasks = [Fill(filter_id, tuple(_told_to_all(tasks, graph, members)), tuple(made), members)]
    tasks += of_nodes.run(after, made, behind)
    tasks = list(_with_syncs(tasks, graph, layouts, shared))
    there = {(task.value, task.reader_space, task.target) for task in tasks if isinstance(task, Exchange)}
    tasks += [replace(task, lag=max_staleness) for task in of_nodes.run(behind)]
    for value in (*made, *(node.id for node in after)):
        crosses = of_nodes.exchanges(value, behind)
        tasks += [each for each in crosses if (each.value, each.reader_space, each.target) not in there]
    return Plan((*_told(tasks, graph), Reduce(world, lag=max_staleness)), max_staleness)


def _continued_node(graph: Graph) -> Node:
    """The rollout node whose responses can be cut off and continued.

    Raises:
        UserError: There is none, or there are several; or it reads more than prompts.
    """
    cannot = "`trainer.partial_rollout` is set, and"
    samples = [node for node in graph.order if node.kind == "rollout"]
    if len(samples) != 1:
        found = " and ".join(f"`{node.id}`" for node in samples)
        why = f"{found} would have to wait for one another" if found else "no node generates"
        raise UserError(f"{cannot} {why}; leave it out, or take an algorithm with one rollout node")
    (node,) = samples
    others = [name for name in node.needs if name != BATCH]
    if others:
        why = f"reads `{others[0]}`, which is of one draw"
        raise UserError(f"{cannot} `{node.id}` {why}; leave it out, or let the node sample from `batch` alone")
    if graph.filter is not None and node not in graph.block:
        raise UserError(
            f"{cannot} the filter `{graph.filter.id}` chooses prompts before `{node.id}` samples; leave it out, or let"
            " the filter read the samples"
        )
    return node


def _ahead_of_training(graph: Graph, placed: Mapping[str, Layout]) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The nodes that need no rank that trains, nor a value made there; and the others."""
    training = {rank for node in graph.order if node.kind == "train" for rank in placed[node.id].ranks}
    ahead: list[Node] = []
    for node in graph.order:
        made = {BATCH, *(earlier.id for earlier in ahead)}
        if not training.intersection(placed[node.id].ranks) and made.issuperset(node.needs):
            ahead.append(node)
    samples = [node for node in graph.order if node.kind == "rollout"]
    if not samples:
        raise UserError("`trainer.max_staleness` is set and no node generates, so nothing can run ahead; leave it out")
    for node in samples:
        if node not in ahead:
            both = training.intersection(placed[node.id].ranks)
            why = "it reads what training makes"
            if both:
                why = f"{rank_ranges(tuple(sorted(both)))} would both generate and train"
            elif after := _trains_before(node, graph):
                raise UserError(
                    f"`trainer.max_staleness` is set and `{node.id}` generates after `{after}` has trained, so it"
                    " cannot run ahead of training; leave `max_staleness` out, or generate without it"
                )
            raise UserError(
                f"`trainer.max_staleness` is set and `{node.id}` cannot run ahead of training: {why}; place `{ROLLOUT}`"
                " and the trained roles on ranks of their own under `placement`"
            )
    return tuple(ahead), tuple(node for node in graph.order if node not in ahead)


def _trains_before(node: Node, graph: Graph) -> str:
    """The first train node that comes before `node`; empty where none does."""
    before = with_ancestors([node.id], graph.nodes)
    return next((each.id for each in graph.order if each.kind == "train" and each.id in before), "")


@dataclass(frozen=True)
class _NodeTasks:
    """What runs nodes and brings their values to one another.

    Attributes:
        graph: Graph of the module.
        placed: By value, the layout in which it is made.
        frees: By node, the values that nobody reads after it.
    """

    graph: Graph
    placed: Mapping[str, Layout]
    frees: Mapping[str, tuple[str, ...]]

    def run(self, nodes: Sequence[Node], made: Sequence[str] = (), later: Sequence[Node] = ()) -> Iterator[Task]:
        """What runs these nodes, and brings values to those of them that read them.

        A value goes to its readers as soon as it and the rows in which they read it are there.

        Args:
            nodes: In the order of execution.
            made: Values that were made before.
            later: Nodes that run later: what they read of a value in the same place comes with it.
        """
        waiting = [each for value in made for each in self.exchanges(value, nodes, later)]
        coming = {node.id for node in nodes}
        for node in (None, *nodes):
            if node is not None:
                task = TrainNode if node.kind == "train" else RunNode
                yield task(node.id, self.placed[node.id], self.frees[node.id])
                coming.remove(node.id)
                waiting += self.exchanges(node.id, nodes, later)
            yield from (each for each in waiting if each.reader_space not in coming)
            waiting = [each for each in waiting if each.reader_space in coming]

    def held_back(self, block: Sequence[Node]) -> Iterator[Task]:
        """What runs nodes of which the first makes responses that may be cut off; what is cut off goes no further."""
        first, *rest = block
        yield RunNode(first.id, self.placed[first.id], frees=())
        members = {rank for node in block for rank in self.placed[node.id].ranks}
        yield HoldBack(first.id, self.frees[first.id], tuple(sorted(members)))
        yield from self.run(rest, [BATCH, first.id])

    def exchanges(self, value: str, readers: Sequence[Node], later: Sequence[Node] = ()) -> Iterator[Exchange]:
        """One for each pair of row space and layout in which `readers` read `value` and in which it was not made."""
        afterwards = self._places(value, later)
        for place, nodes in self._places(value, readers).items():
            if place != (self.graph.space_of(value), self.placed[value]):
                columns = [self.graph.columns(value, each) for each in (nodes, afterwards.get(place)) if each]
                only = tuple(dict.fromkeys(name for each in columns for name in each or ()))
                rows, target = place
                yield Exchange(value, rows, self.placed[value], target, columns=None if None in columns else only)

    def _places(self, value: str, nodes: Sequence[Node]) -> dict[tuple[str, Layout], list[Node]]:
        """The nodes that read a value, by the rows and the layout in which they do."""
        places: dict[tuple[str, Layout], list[Node]] = {}
        for node in _reads(nodes, value):
            places.setdefault((self.graph.seen_in(node, value), self.placed[node.id]), []).append(node)
        return places


def _reads(nodes: Collection[Node], value: str) -> list[Node]:
    return [node for node in nodes if value in node.reads]


def sync_of(policy: str, graph: Graph, layouts: Mapping[str, Layout]) -> SyncWeights:
    """What brings a policy's weights to its engines: from ranks that hold them, if steps change them, or from files."""
    source = layouts[policy].ranks if policy in graph.changed_roles() else ()
    return SyncWeights(policy, source, layouts[engine_of(policy)].ranks)


def _with_syncs(
    tasks: Sequence[Task], graph: Graph, layouts: Mapping[str, Layout], shared: Mapping[str, str]
) -> Iterator[Task]:
    """The tasks, with each policy's weights brought to its engines before they generate, and what rests put to sleep.

    Engines of policies that no task needs together are awake one after another, where they share ranks. After the last
    task that generates they sleep if their ranks train, or hold other engines; before it, while their ranks train. What
    a train node has changed comes to the engines anew before they generate again.
    """
    every = {policy: sync_of(policy, graph, layouts) for policy in graph.policies()}
    training = {rank for node in graph.order if node.kind == "train" for rank in layouts[str(node.role)].ranks}
    awake: list[str] = []
    outdated: set[str] = set()
    changed: Counter[str] = Counter()
    last = max((place for place, task in enumerate(tasks) if _generates(task, graph)), default=-1)

    def sleep(policy: str) -> Sleep:
        awake.remove(policy)
        return Sleep(policy, every[policy].ranks)

    for place, task in enumerate(tasks):
        needed = _generates(task, graph)
        changes = graph.changed_by(graph.nodes[task.node_id]) if isinstance(task, TrainNode) else ()
        ranks = {rank for policy in needed for rank in every[policy].target} | {*(task.ranks if changes else ())}
        for policy in [other for other in awake if other not in needed and ranks.intersection(every[other].target)]:
            yield sleep(policy)
        in_turns = len({shared.get(policy, policy) for policy in needed}) < len(needed)
        if in_turns and isinstance(task, Fill):
            _refuse_turns_of_others(task, needed, every)
            task = replace(task, tasks=tuple(_with_syncs(task.tasks, graph, layouts, shared)))
        else:
            for policy in needed:
                if policy in awake and policy not in outdated:
                    continue
                awake += [] if policy in awake else [policy]
                outdated.discard(policy)
                yield replace(every[policy], changed=changed[policy])
        yield task
        changed.update(changes)
        outdated.update(changes)
        if place == last:
            for policy in list(awake):
                several = any(other != policy for other in every)
                if several or training.intersection(every[policy].target):
                    yield sleep(policy)


def _refuse_turns_of_others(repeated: Fill, policies: Sequence[str], syncs: Mapping[str, SyncWeights]) -> None:
    """Weights change within what is repeated, so all ranks that send them must repeat it."""
    for policy in policies:
        if not set(syncs[policy].ranks) <= set(repeated.ranks):
            raise UserError(
                f"`engines` lets policies share an engine in turns, and a filter or partial rollout repeats the nodes"
                f" that generate on {rank_ranges(repeated.ranks)}, where the model of `{policy}` does not live; give"
                " each policy an engine of its own, or place models and engines on the same ranks"
            )


def _generates(task: Task, graph: Graph) -> tuple[str, ...]:
    """The policies that a task generates with, or that what it repeats does."""
    if isinstance(task, Fill):
        return tuple(dict.fromkeys(policy for each in task.tasks for policy in _generates(each, graph)))
    return graph.nodes[task.node_id].generates if isinstance(task, RunNode) else ()


def _told_to_all(tasks: Sequence[Task], graph: Graph, members: tuple[int, ...]) -> Iterator[Task]:
    """The tasks, each followed by what tells all members of the rows that it made."""
    for task in tasks:
        yield task
        for rows in _made_by(task, graph):
            if others := {*members}.difference(task.ranks):
                yield Tell(rows, task.ranks[0], tuple(sorted(others)))


def _told(tasks: Sequence[Task], graph: Graph) -> Iterator[Task]:
    """The tasks, each after the ranks in it were told of rows that they have no part in making.

    Of ranks that need not know before the tasks that lag, none is told before: they are busy until then.
    """
    lagging = next((place for place, task in enumerate(tasks) if task.lag), len(tasks))
    knowing: dict[str, set[int]] = {}
    teller: dict[str, int] = {}
    for place, task in enumerate(tasks):
        for rows in () if task.lag else _rows_of(task, graph):  # what lags was told in its own slot
            if rows in knowing and not knowing[rows].issuperset(task.ranks):
                users = tasks[:lagging] if place < lagging else tasks
                hearers = {rank for user in users if rows in _rows_of(user, graph) for rank in user.ranks}
                yield Tell(rows, teller[rows], tuple(sorted(hearers - knowing[rows])))
                knowing[rows] |= hearers
        yield task
        for made in task.tasks if isinstance(task, Fill) else [task]:
            for rows in _made_by(made, graph):
                if not (task.lag and rows in knowing):  # what lags tells nobody of the step that is generated
                    knowing[rows], teller[rows] = set(task.ranks), made.ranks[0]


def _made_by(task: Task, graph: Graph) -> tuple[str, ...]:
    """Of what the task makes rows, or marks some as dropped: `batch`, or a node that makes its own."""
    if isinstance(task, Load):
        return (task.value,)
    if not isinstance(task, RunNode):
        return ()
    node = graph.nodes[task.node_id]
    return (node.id,) if node.makes_rows else graph.marked_by(node)


def _rows_of(task: Task, graph: Graph) -> tuple[str, ...]:
    """Of what a rank must know the rows to take part in the task."""
    if isinstance(task, Load):
        return (task.value,)
    if isinstance(task, RunNode | TrainNode):
        node = graph.nodes[task.node_id]
        return tuple(dict.fromkeys((node.inside, *_made_by(task, graph), *node.follows)))
    if isinstance(task, Exchange):
        return tuple(dict.fromkeys((graph.space_of(task.value), task.reader_space)))
    return ()


def _frees(order: Sequence[Node], graph: Graph) -> dict[str, tuple[str, ...]]:
    """By node, the values that nobody reads after it, its own included; a filter's own is read by what repeats it."""
    freed: dict[str, tuple[str, ...]] = {}
    for place, node in enumerate(order):
        last = [name for name in node.reads if not _reads(order[place + 1 :], name)]
        unread = node.kind not in ("train", "filter") and not graph.readers(node.id)
        freed[node.id] = (*last, node.id) if unread else tuple(last)
    return freed


def _of_rank(tasks: tuple[Task, ...], rank: int) -> tuple[Task, ...]:
    own = (task for task in tasks if rank in task.ranks)
    return tuple(replace(task, tasks=_of_rank(task.tasks, rank)) if isinstance(task, Fill) else task for task in own)
