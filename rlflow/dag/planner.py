"""The plan: one global order of tasks, from a graph and the layouts of its roles; each rank runs the tasks it is in.

It is a pure function of its arguments, so every rank makes the same plan, and its digest is compared before step 0.
Because all ranks issue their collectives in the one global order, collectives cannot cross. GRPO with the actor on
ranks 0 and 1 and its engines on ranks 2 and 3 (the columns of the first exchange are left out here):

    load      batch: ranks 2-3, 2 shards, groups
    sync      actor -> rollout: ranks 0-1 -> ranks 2-3
    run       rollout: ranks 2-3, 2 shards, groups; frees batch
    broadcast rows of rollout: rank 2 -> ranks 0-1
    exchange  rollout: ranks 2-3, 2 shards, groups -> ranks 0-1, 2 shards, balanced; rows of rollout
    run       rewards: ranks 2-3, 2 shards, groups
    run       advantages: ranks 2-3, 2 shards, groups; frees rewards
    exchange  advantages: ranks 2-3, 2 shards, groups -> ranks 0-1, 2 shards, balanced; rows of rollout
    train     actor_loss: ranks 0-1, 2 shards, balanced; frees rollout, advantages
    reduce    metrics: ranks 0-3
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from rlflow.dag.graph import Graph, with_ancestors
from rlflow.dag.node import BATCH, ROLLOUT, Node, engine_of
from rlflow.dag.tasks import (
    BroadcastRows,
    DeferUnfinished,
    DynamicSampling,
    Exchange,
    Load,
    Reduce,
    RunNode,
    Sleep,
    SyncWeights,
    Task,
    TrainNode,
    rank_ranges,
    task_lines,
)
from rlflow.errors import UserError
from rlflow.values.column_kinds import ColumnKind
from rlflow.values.columns import Column, columns
from rlflow.values.layout import Layout


@dataclass(frozen=True)
class Plan:
    """The tasks of one step, in the global order. If steps overlap, one step is generated and an earlier one trained.

    Attributes:
        tasks: The tasks. While tasks without lag work on step s, a task of lag n works on step s - n.
        max_staleness: Number of steps by which generation runs ahead of training: the largest lag.
    """

    tasks: tuple[Task, ...]
    max_staleness: int = 0

    def for_rank(self, rank: int) -> tuple[Task, ...]:
        """The tasks in which `rank` takes part, in the global order."""
        return _of_rank(self.tasks, rank)

    def every(self) -> Iterator[Task]:
        """All tasks, in the global order; the tasks of a `DynamicSampling` follow it, once."""
        for task in self.tasks:
            yield task
            if isinstance(task, DynamicSampling):
                yield from task.tasks

    @property
    def dynamic_sampling(self) -> DynamicSampling | None:
        """The task that repeats draws of prompts; None without a filter and partial rollouts."""
        return next((task for task in self.tasks if isinstance(task, DynamicSampling)), None)

    @property
    def cuts_off(self) -> bool:
        """Whether long responses are cut off and continued in the next draw (`trainer.partial_rollout`)."""
        return any(isinstance(task, DeferUnfinished) for task in self.every())

    def groups(self) -> list[tuple[int, ...]]:
        """The distinct sets of ranks that run a task together: the process groups that the plan needs."""
        return list(dict.fromkeys(task.ranks for task in self.every()))

    def crossing(self) -> tuple[Task, ...]:
        """The tasks that send values from ranks that run ahead to those that train; empty if steps do not overlap."""
        trains = (place for place, task in enumerate(self.tasks) if task.lag and not isinstance(task, Reduce))
        last = max(trains, default=len(self.tasks))
        return tuple(task for task in self.tasks[last:] if not task.lag)

    def layouts(self) -> dict[str, Layout]:
        """The layout in which each value is made, by name: `batch` and the nodes."""
        loaded = {task.value: task.layout for task in self.every() if isinstance(task, Load)}
        return loaded | {task.node_id: task.layout for task in self.every() if isinstance(task, RunNode | TrainNode)}

    def exchange(self, value: str, reader: Node, rows: str) -> Exchange | None:
        """The exchange that brings `value` to `reader`; None if the reader gets the object itself that was made.

        Args:
            value: The value's name.
            reader: The node that reads it.
            rows: The row space in which the node reads it.
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
    """Plan one step, or the two steps that overlap. Called on every rank, without communication.

    With `max_staleness` N, ranks that train no role run N steps ahead of those that do. They send their values of step
    s as soon as these are made. Step s is trained while they work on step s + N.

    Args:
        graph: The checked graph.
        layouts: The layout of each role that the graph uses, and of each policy's engines under `engine_of(policy)`:
            `{"actor": ..., "actor.rollout": ...}`.
        world_size: The number of ranks.
        max_staleness: Number of steps by which generation runs ahead; 0 for steps that do not overlap.
        cuts_off: Whether long responses are cut off and continued in the next draw of prompts.
        shared: Policies that take turns in the engine of another policy, each with that other policy.

    Raises:
        UserError: Policies of one node are on different ranks, nothing can run ahead, or responses cannot be cut off.
    """
    world = tuple(range(world_size))
    placed = node_layouts(graph, layouts, world)
    begins = _continued_node(graph) if cuts_off else None
    if begins is not None:
        placed[BATCH] = placed[begins.id]  # prompts are on the ranks that store their responses
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
        tasks = [DynamicSampling(filter_id, tuple(_sent_to_all(tasks, graph, members)), tuple(made), members)]
    tasks += of_nodes.run(after, made, behind)
    tasks = list(_with_syncs(tasks, graph, layouts, shared))
    there = {(task.value, task.reader_space, task.target) for task in tasks if isinstance(task, Exchange)}
    tasks += [replace(task, lag=max_staleness) for task in of_nodes.run(behind)]
    for value in (*made, *(node.id for node in after)):
        crosses = of_nodes.exchanges(value, behind)
        tasks += [each for each in crosses if (each.value, each.reader_space, each.target) not in there]
    return Plan((*_with_broadcasts(tasks, graph), Reduce(world, lag=max_staleness)), max_staleness)


def node_layouts(graph: Graph, layouts: Mapping[str, Layout], world: tuple[int, ...]) -> dict[str, Layout]:
    """The layout of every node, and of `batch` where it is read."""
    placed: dict[str, Layout] = {}
    fixed = {node.id: _engines_of_node(node, layouts) for node in graph.order if node.generates}
    fixed |= {node.id: layouts[node.role] for node in graph.order if node.role is not None and not node.generates}
    policies = graph.policies()
    otherwise = layouts[engine_of(policies[0])].ranks if policies else world
    for node in graph.order:
        placed[node.id] = fixed.get(node.id) or _without_role(node, graph, placed, fixed, otherwise)
    readers = graph.readers(BATCH)
    if not readers:
        return placed
    first = placed[readers[0].id]
    return {BATCH: Layout(first.ranks, first.shards), **placed}


def _engines_of_node(node: Node, layouts: Mapping[str, Layout]) -> Layout:
    """The layout in which a node generates: the layout of its policies' engines, which must all have the same."""
    first, *others = node.generates
    there = layouts[engine_of(first)]
    for other in others:
        if layouts[engine_of(other)] != there:
            raise UserError(
                f"node `{node.id}` generates with `{first}` on {_described(there)} and with `{other}` on"
                f" {_described(layouts[engine_of(other)])}; place `{engine_of(first)}` and `{engine_of(other)}` alike,"
                " or generate in a node for each"
            )
    return there


def _described(engines: Layout) -> str:
    share = f", {engines.copies} to an engine" if engines.copies > 1 else ""
    return f"{rank_ranges(engines.ranks)}{share}"


def _without_role(
    node: Node, graph: Graph, placed: Mapping[str, Layout], fixed: Mapping[str, Layout], otherwise: tuple[int, ...]
) -> Layout:
    """The layout of a node without a role: whole groups if it needs them, else the layout with most of what it reads.

    Args:
        node: The node.
        graph: Graph of the module.
        placed: The layouts of the values that are planned so far, in their order.
        fixed: Layouts of the nodes that have a role or generate.
        otherwise: The ranks of a node that reads nothing but the batch.
    """
    made = [name for name in placed if name in node.reads]
    at_home = [name for name in made if _reads_at_home(node, name, graph)]
    same_rows = [placed[name] for name in made if graph.nodes[name].has_rows and graph.space_of(name) == node.inside]
    if at_home or not same_rows or _sees_groups(node, graph):
        ranks = placed[(at_home or made)[-1]].ranks if made else otherwise
        return Layout(ranks, len(ranks))
    there = {**fixed, **placed}
    most = max(reversed(same_rows), key=lambda layout: _held(node, layout, graph, there))  # if equal, the last made
    # A shard for each rank, so that ranks which share an engine do not compute the same rows.
    return Layout(most.ranks, len(most.ranks)) if most.shard_by == "groups" else most


def _sees_groups(node: Node, graph: Graph) -> bool:
    """Whether a node needs whole groups on a rank: it may compare the rows of a group, or makes rows from them."""
    if node.makes_rows or node.kind == "filter" or any(each.each for each in node.inputs):
        return True
    return any(column.kind is ColumnKind.PATH for name in node.reads for column in _columns_read(node, name, graph))


def _held(node: Node, layout: Layout, graph: Graph, there: Mapping[str, Layout]) -> tuple[int, int]:
    """Numbers of columns (per token, per row) that a node reads and that are in a layout already: made or read there.

    Args:
        node: The node.
        layout: The layout.
        graph: Graph of the module.
        there: Layout in which each node runs, by node, as far as it is known.
    """
    tokens = rows = 0
    for name in node.reads:
        readers = [each for each in graph.readers(name) if there.get(each.id) == layout]
        readers = [each for each in readers if graph.seen_in(each, name) == node.inside]
        is_made_there = there.get(name) == layout and graph.space_of(name) == node.inside
        read = frozenset[str]().union(*(graph.fields[each.id, name].names for each in readers))
        held = [each for each in _columns_read(node, name, graph) if is_made_there or each.name in read]
        tokens += sum(each.kind in (ColumnKind.TOKEN, ColumnKind.RAGGED) for each in held)
        rows += sum(each.kind is ColumnKind.SAMPLE for each in held)
    return tokens, rows


def _columns_read(node: Node, value: str, graph: Graph) -> list[Column]:
    names = graph.fields[node.id, value].names
    return [column for column in columns(graph.type_of(value)) if column.name in names]


def _reads_at_home(node: Node, value: str, graph: Graph) -> bool:
    return any(column.on_demand for column in _columns_read(node, value, graph))


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
    """The nodes that can run ahead of training, and the other nodes.

    A node can run ahead if it is on no rank that trains, and needs no value that is made on such a rank.

    Raises:
        UserError: A node that generates cannot run ahead, or no node generates.
    """
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
    """Id of the first train node that `node` comes after; empty if there is none."""
    before = with_ancestors([node.id], graph.nodes)
    return next((each.id for each in graph.order if each.kind == "train" and each.id in before), "")


@dataclass(frozen=True)
class _NodeTasks:
    """Makes the tasks that run nodes, and the exchanges between them.

    Attributes:
        graph: Graph of the module.
        placed: The layout in which a value is made, by value.
        frees: The values that no later node reads, by the node after which they are freed.
    """

    graph: Graph
    placed: Mapping[str, Layout]
    frees: Mapping[str, tuple[str, ...]]

    def run(self, nodes: Sequence[Node], made: Sequence[str] = (), later: Sequence[Node] = ()) -> Iterator[Task]:
        """The tasks that run these nodes and send each value to the ones that read it.

        A value is sent as soon as it and the rows in which it is read have been made.

        Args:
            nodes: The nodes to run, in the order of execution.
            made: Values that were made before.
            later: Nodes that run in a later task list. An exchange for `nodes` also brings the columns that these read
                in the same row space and layout.
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
        """The tasks of one draw with partial rollouts: run the first node, hold back unfinished groups, run others."""
        first, *rest = block
        yield RunNode(first.id, self.placed[first.id], frees=())
        members = {rank for node in block for rank in self.placed[node.id].ranks}
        yield DeferUnfinished(first.id, self.frees[first.id], tuple(sorted(members)))
        yield from self.run(rest, [BATCH, first.id])

    def exchanges(self, value: str, readers: Sequence[Node], later: Sequence[Node] = ()) -> Iterator[Exchange]:
        """One exchange of `value` for each row space and layout in which `readers` read it and it was not made."""
        afterwards = self._places(value, later)
        for place, nodes in self._places(value, readers).items():
            if place != (self.graph.space_of(value), self.placed[value]):
                columns = [self.graph.columns(value, each) for each in (nodes, afterwards.get(place)) if each]
                only = tuple(dict.fromkeys(name for each in columns for name in each or ()))
                rows, target = place
                yield Exchange(value, rows, self.placed[value], target, columns=None if None in columns else only)

    def _places(self, value: str, nodes: Sequence[Node]) -> dict[tuple[str, Layout], list[Node]]:
        """The nodes that read a value, by the row space and the layout in which they read it."""
        places: dict[tuple[str, Layout], list[Node]] = {}
        for node in _reads(nodes, value):
            places.setdefault((self.graph.seen_in(node, value), self.placed[node.id]), []).append(node)
        return places


def _reads(nodes: Collection[Node], value: str) -> list[Node]:
    return [node for node in nodes if value in node.reads]


def sync_of(policy: str, graph: Graph, layouts: Mapping[str, Layout]) -> SyncWeights:
    """The task that brings a policy's weights to its engines: from ranks if steps change them, else from files."""
    source = layouts[policy].ranks if policy in graph.changed_roles() else ()
    return SyncWeights(policy, source, layouts[engine_of(policy)].ranks)


def _with_syncs(
    tasks: Sequence[Task], graph: Graph, layouts: Mapping[str, Layout], shared: Mapping[str, str]
) -> Iterator[Task]:
    """The tasks, with a `SyncWeights` before engines generate, and a `Sleep` where their ranks need the memory.

    Engines that share ranks sleep while those of another policy generate there, and all engines while their ranks
    train. After the last task that generates, engines sleep if their ranks train or if there are several policies.
    Weights that a train node has changed are sent again before the policy generates again.
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
        if in_turns and isinstance(task, DynamicSampling):
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


def _refuse_turns_of_others(
    repeated: DynamicSampling, policies: Sequence[str], syncs: Mapping[str, SyncWeights]
) -> None:
    """Raise a `UserError` if policies take turns in an engine, and a rank of their syncs does not repeat the tasks."""
    for policy in policies:
        if not set(syncs[policy].ranks) <= set(repeated.ranks):
            raise UserError(
                f"`engines` lets policies share an engine in turns, and a filter or partial rollout repeats the nodes"
                f" that generate on {rank_ranges(repeated.ranks)}, where the model of `{policy}` does not live; give"
                " each policy an engine of its own, or place models and engines on the same ranks"
            )


def _generates(task: Task, graph: Graph) -> tuple[str, ...]:
    """The policies that a task, or a task that it repeats, generates with."""
    if isinstance(task, DynamicSampling):
        return tuple(dict.fromkeys(policy for each in task.tasks for policy in _generates(each, graph)))
    return graph.nodes[task.node_id].generates if isinstance(task, RunNode) else ()


def _sent_to_all(tasks: Sequence[Task], graph: Graph, members: tuple[int, ...]) -> Iterator[Task]:
    """The repeated tasks, each followed by a `BroadcastRows` that sends the rows it made to the other ranks."""
    for task in tasks:
        yield task
        for rows in _made_by(task, graph):
            if others := {*members}.difference(task.ranks):
                yield BroadcastRows(rows, task.ranks[0], tuple(sorted(others)))


def _with_broadcasts(tasks: Sequence[Task], graph: Graph) -> Iterator[Task]:
    """The tasks, with a `BroadcastRows` before each task whose rows some of its ranks do not know yet.

    A rank that needs the rows only after the first task that lags gets them just before it needs them, since it is busy
    until then.
    """
    lagging = next((place for place, task in enumerate(tasks) if task.lag), len(tasks))
    knowing: dict[str, set[int]] = {}
    source: dict[str, int] = {}
    for place, task in enumerate(tasks):
        for rows in () if task.lag else _rows_of(task, graph):  # those of a task that lags were sent in its own step
            if rows in knowing and not knowing[rows].issuperset(task.ranks):
                users = tasks[:lagging] if place < lagging else tasks
                receivers = {rank for user in users if rows in _rows_of(user, graph) for rank in user.ranks}
                yield BroadcastRows(rows, source[rows], tuple(sorted(receivers - knowing[rows])))
                knowing[rows] |= receivers
        yield task
        for made in task.tasks if isinstance(task, DynamicSampling) else [task]:
            for rows in _made_by(made, graph):
                if not (task.lag and rows in knowing):  # these would be rows of an earlier step
                    knowing[rows], source[rows] = set(task.ranks), made.ranks[0]


def _made_by(task: Task, graph: Graph) -> tuple[str, ...]:
    """The row spaces in which a task makes rows or marks rows as dropped: `batch`, or ids of nodes that make rows."""
    if isinstance(task, Load):
        return (task.value,)
    if not isinstance(task, RunNode):
        return ()
    node = graph.nodes[task.node_id]
    return (node.id,) if node.makes_rows else graph.marked_by(node)


def _rows_of(task: Task, graph: Graph) -> tuple[str, ...]:
    """The row spaces that a rank must know to take part in the task."""
    if isinstance(task, Load):
        return (task.value,)
    if isinstance(task, RunNode | TrainNode):
        node = graph.nodes[task.node_id]
        return tuple(dict.fromkeys((node.inside, *_made_by(task, graph), *node.follows)))
    if isinstance(task, Exchange):
        return tuple(dict.fromkeys((graph.space_of(task.value), task.reader_space)))
    return ()


def _frees(order: Sequence[Node], graph: Graph) -> dict[str, tuple[str, ...]]:
    """Values that no later node reads, its own included, by node; a filter's value is read by `DynamicSampling`."""
    freed: dict[str, tuple[str, ...]] = {}
    for place, node in enumerate(order):
        last = [name for name in node.reads if not _reads(order[place + 1 :], name)]
        unread = node.kind not in ("train", "filter") and not graph.readers(node.id)
        freed[node.id] = (*last, node.id) if unread else tuple(last)
    return freed


def _of_rank(tasks: tuple[Task, ...], rank: int) -> tuple[Task, ...]:
    own = (task for task in tasks if rank in task.ranks)
    return tuple(
        replace(task, tasks=_of_rank(task.tasks, rank)) if isinstance(task, DynamicSampling) else task for task in own
    )
