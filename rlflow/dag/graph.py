"""The graph of an algorithm, read from its module and checked before any process starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType
from typing import Any, Self

from rlflow.dag import graph_checks
from rlflow.dag.annotations import choices, members, names_fields
from rlflow.dag.fields import FieldsRead, fields_read
from rlflow.dag.methods import read_methods
from rlflow.dag.node import BATCH, GraphError, Input, Node, Problem
from rlflow.errors import UserError
from rlflow.values.batch import Batch
from rlflow.values.columns import columns
from rlflow.values.protocols import WithTexts
from rlflow.values.rollout import Rollout

__all__ = ["Graph", "GraphError", "Input", "Node", "Problem"]


@dataclass(frozen=True)
class Graph:
    """The nodes of an algorithm: an edge leads from a node to every node that has a parameter of its name.

    Attributes:
        nodes: Nodes by name, in the order of declaration: base classes first; an override keeps its place.
        order: The order of execution: by depth, then declaration, train nodes last; a filter and its ancestors first.
        averages: Handles of moving averages, each with the handle of the model that it follows.
        batch_type: The type of the dataset's rows: `Batch`, or `Pairs`.
        fields: The fields of a value that a node reads, and why, by node and value.
    """

    nodes: Mapping[str, Node]
    order: tuple[Node, ...]
    averages: Mapping[str, str] = field(default_factory=dict, repr=False)
    batch_type: type = Batch
    fields: Mapping[tuple[str, str], FieldsRead] = field(default_factory=dict, repr=False)

    @classmethod
    def read(
        cls,
        module: object,
        roles: Collection[str] = (),
        policies: Collection[str] | None = None,
        averages: Mapping[str, str] = MappingProxyType({}),
        drops: bool = False,
    ) -> Self:
        """Read and check the graph of the instance `module`; a node that `__init__` sets to None is left out.

        Args:
            module: An instance whose class has methods marked `@node`, or that has `Call`s from a config instead.
            roles: The names of its model handles.
            policies: Names of the handles that are language models, which can generate; None for all.
            averages: Handles of moving averages, each with the handle of the model that it follows.
            drops: Whether samples on which the module's reward fails are dropped.

        Raises:
            GraphError: The graph has mistakes; the error lists all of them, each with file and line.
            UserError: The module has no node.
        """
        written, removed, problems = read_methods(module)
        if not written and not problems:
            steps = "Mark the steps of the algorithm with `@node`, or write them under `nodes` in the config"
            raise UserError(f"`{type(module).__name__}` has no node. {steps}")
        policies = roles if policies is None else policies
        nodes = {name: _without_absent(node, {BATCH, *written}) for name, node in written.items()}
        order, cycles = in_order(nodes, averages)
        nodes = {name: _with_policy(node, order, policies) for name, node in nodes.items()}
        placed, mixed = with_rows((nodes[node.id] for node in order), drops)
        nodes |= placed
        order = tuple(placed.values())
        problems += [
            *graph_checks.missing(nodes, removed, type(module)),
            *graph_checks.mistyped(nodes),
            *graph_checks.mispaired(nodes),
            *graph_checks.miscast(nodes, roles),
            *graph_checks.misgenerated(nodes, roles, policies),
            *graph_checks.misused(nodes, roles),
            *graph_checks.unmasked(nodes),
            *graph_checks.misfiltered(nodes, block(nodes)),
            *cycles,
            *mixed,
            *graph_checks.mislaid(order, nodes),
        ]
        if problems:
            raise GraphError(*sorted(problems, key=lambda problem: (problem.file, problem.line)))
        made = cls(nodes, order, averages, graph_checks.type_of_batch(nodes))
        reads = ((node, value) for node in made.order for value in node.reads)
        watched = {*made.trained_roles(), *(policy for policy in made.policies() if policy in averages)}
        fields = {
            (node.id, value): fields_read(module, node, value, made.type_of(value), watched) for node, value in reads
        }
        return replace(made, fields=fields)

    @property
    def filter(self) -> Node | None:
        """The node that says which groups of rows a step keeps; None without a filter."""
        return next((node for node in self.order if node.kind == "filter"), None)

    @property
    def block(self) -> tuple[Node, ...]:
        """The filter's ancestors and the filter, in the order of execution; they repeat until a step is full."""
        repeated = block(self.nodes)
        return tuple(node for node in self.order if node.id in repeated)

    def readers(self, value: str) -> tuple[Node, ...]:
        """The nodes that read `value`, in the order of execution."""
        return tuple(node for node in self.order if value in node.reads)

    def columns(self, value: str, readers: Collection[Node]) -> tuple[str, ...] | None:
        """The fields of `value` that these readers read together, in the order of its type.

        None stands for all fields that are not marked `OnDemand`.
        """
        read = frozenset[str]().union(*(self.fields[reader.id, value].names for reader in readers))
        every = columns(self.type_of(value))
        if read == {column.name for column in every if not column.on_demand}:
            return None
        return tuple(column.name for column in every if column.name in read)

    def trained_roles(self) -> tuple[str, ...]:
        """The roles that train nodes train, each once, in the order of execution."""
        return tuple(dict.fromkeys(node.role for node in self.order if node.kind == "train" and node.role is not None))

    def changed_by(self, node: Node) -> tuple[str, ...]:
        """The models whose weights a node changes: its role, and if no later node trains the role, its averages."""
        if node.kind != "train":
            return ()
        role, used = str(node.role), self.roles()
        last = next(other for other in reversed(self.order) if (other.kind, other.role) == ("train", node.role))
        follow = (name for name, owner in self.averages.items() if owner == role and name in used)
        return (role, *follow) if node == last else (role,)

    def changed_roles(self) -> tuple[str, ...]:
        """All models whose weights a step changes: those that are trained, and averages of them."""
        return tuple(dict.fromkeys(name for node in self.order for name in self.changed_by(node)))

    def changed_before(self, node: Node) -> Counter[str]:
        """Number of changes of each model's weights in the step, by the time when a node runs."""
        before = self.order[: self.order.index(node)]
        return Counter(name for other in before for name in self.changed_by(other))

    def policies(self) -> tuple[str, ...]:
        """The policies that nodes generate with, each once, in the order of execution."""
        return tuple(dict.fromkeys(policy for node in self.order for policy in node.generates))

    def type_of(self, value: str) -> Any:
        """The annotated type of a value as its node declares it; of `batch` as its readers do: `Batch` or `Pairs`."""
        return self.batch_type if value == BATCH else self.nodes[value].returns

    def space_of(self, value: str) -> str:
        """The row space of a value: `batch`, or the id of the node that made its rows."""
        return BATCH if value == BATCH else self.nodes[value].space

    def seen_in(self, node: Node, value: str) -> str:
        """The row space in which `node` sees a value: the node's own, or the value's if it has no rows."""
        rowless = value != BATCH and not self.nodes[value].has_rows
        return self.space_of(value) if rowless else node.inside

    def levels(self, space: str) -> tuple[str, ...]:
        """The names of the levels from the prompts to a row space, its own name last."""
        return levels(space, self.nodes)

    def marked_by(self, node: Node) -> tuple[str, ...]:
        """The row space whose rows a node that scores may drop; empty if no node depends on its scores."""
        followed = any(node.space in other.follows for other in self.order)
        return (node.space,) if followed and scores_rows(node) else ()

    def roles(self) -> KeysView[str]:
        """The roles whose weights ranks hold, in the order of declaration, the same on every rank.

        These are the roles that nodes score with, use or train, and the averages that nodes generate with. The weights
        of an average exist only on the ranks of the model that it follows.
        """
        used = [role for node in self.nodes.values() for role in (node.role, *node.uses)]
        used += [policy for node in self.nodes.values() for policy in node.generates if policy in self.averages]
        return dict.fromkeys(role for role in used if role is not None).keys()


def _without_absent(node: Node, known: Collection[str]) -> Node:
    """`node` without optional inputs that no node makes; these parameters keep their defaults."""
    present = [value for value in node.inputs if value.required or value.name in known]
    return replace(node, inputs=tuple(present))


def block(nodes: Mapping[str, Node]) -> set[str]:
    """The filter and its ancestors, which repeat until a step is full; empty where there is no filter."""
    return with_ancestors([node.id for node in nodes.values() if node.kind == "filter"], nodes)


def with_ancestors(names: Iterable[str], nodes: Mapping[str, Node]) -> set[str]:
    """These nodes, and all nodes that they need, directly or through others."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in nodes and name not in found:
            found.add(name)
            todo += nodes[name].needs
    return found


def in_order(
    nodes: Mapping[str, Node], averages: Mapping[str, str] = MappingProxyType({})
) -> tuple[tuple[Node, ...], list[Problem]]:
    """Sort the nodes into the order of execution; also returns a problem for each cycle, whose nodes are left out.

    Nodes are sorted by depth, then by declaration. A filter and its ancestors come before all others, train nodes last.
    A train node that another node reads as `After` is not last but at its depth. It comes after all nodes that use
    its role, or a moving average of it, and do not depend on its training: these see the weights of the step's start.

    Args:
        nodes: Nodes by name, in the order of declaration.
        averages: Roles of moving averages, each with the role that it follows.
    """
    needs = {node.id: [name for name in node.needs if name in nodes] for node in nodes.values()}
    problems = _without_cycles(nodes, needs, "Break the cycle")
    followed = {train for name in needs for train in nodes[name].after}
    trained = [nodes[name] for name in needs if nodes[name].kind == "train" and name in followed]
    later = {train.id: _descendants(train.id, needs) for train in trained}
    for train in trained:
        using = [name for name in needs if _uses(nodes[name], train.role, averages)]
        needs[train.id] += [name for name in using if name not in later[train.id]]
    why = "A train node that is read as After comes after what uses its role before. Break the cycle"
    problems += _without_cycles(nodes, needs, why)

    depth: dict[str, int] = {}
    for name in TopologicalSorter(needs).static_order():
        depth[name] = 1 + max((depth[needed] for needed in needs.get(name, ())), default=0)
    first, last = block(nodes), {node.id for node in nodes.values() if node.kind == "train" and node not in trained}
    order = sorted(needs, key=lambda name: (name in last, name not in first, depth[name]))
    return tuple(nodes[name] for name in order), problems


def _without_cycles(nodes: Mapping[str, Node], needs: dict[str, list[str]], why: str) -> list[Problem]:
    """Remove the nodes of all cycles from `needs`; returns a problem for each cycle."""
    problems: list[Problem] = []
    while True:
        try:
            TopologicalSorter(needs).prepare()
            return problems
        except CycleError as error:
            cycle: list[str] = error.args[1]  # each node is read by the next; the first is repeated at the end
        path = " -> ".join(f"`{name}`" for name in cycle)
        node = nodes[cycle[0]]
        problems.append(node.problem(f"waits for itself: {path}. {why}"))
        for name in set(cycle):
            del needs[name]
        for name, of in needs.items():
            needs[name] = [needed for needed in of if needed in needs]


def _descendants(name: str, needs: Mapping[str, Sequence[str]]) -> set[str]:
    """A node, and all nodes that depend on it."""
    found = {name}
    while more := {other for other, of in needs.items() if other not in found and not found.isdisjoint(of)}:
        found |= more
    return found


def _uses(node: Node, role: str | None, averages: Mapping[str, str]) -> bool:
    """Whether a node that does not train calls this model or an average of it.

    A node that generates without naming a policy counts as one that calls every model.
    """
    called = {node.role, *node.uses, *node.generates}
    called |= {owner for average, owner in averages.items() if average in called}
    generates = node.kind == "rollout" and not node.generates
    return node.kind != "train" and (generates or role in called)


def _with_policy(node: Node, order: Sequence[Node], policies: Collection[str]) -> Node:
    """`node` with a policy: if it generates without naming one, the first language model that is trained."""
    if node.kind != "rollout" or node.generates:
        return node
    trained = (str(other.role) for other in order if other.kind == "train")
    return replace(node, generates=tuple(role for role in trained if role in policies)[:1])


def with_rows(order: Iterable[Node], drops: bool) -> tuple[dict[str, Node], list[Problem]]:
    """Set `space`, `inside` and `follows` of each node; returns the nodes by name, and problems of nodes that mix rows.

    A node sees the deepest row space that it reads without `Each`. Its value has these rows, unless it makes rows of
    its own.

    Args:
        order: The nodes, each after the nodes that it reads.
        drops: Whether samples on which the module's reward fails are dropped. Nodes that depend on scores then run
            without these samples.
    """
    placed: dict[str, Node] = {}
    problems: list[Problem] = []
    for node in order:
        through: dict[str, str] = {}  # row space -> the first value that is read in it without `Each`
        for name in node.reads:
            if name not in node.each and (name not in placed or placed[name].has_rows):
                through.setdefault(_space_of(name, placed), name)
        inside = max(through, key=lambda space: len(levels(space, placed)), default=BATCH)
        problems += _apart(node, through, inside, placed)
        problems += _not_below(node, through, inside, placed)
        scored = [space for name in node.reads if drops and name in placed for space in _scored_behind(placed[name])]
        space, follows = node.id if node.makes_rows else inside, tuple(dict.fromkeys(scored))
        placed[node.id] = replace(node, space=space, inside=inside, follows=follows)
    return placed, problems


def levels(space: str, nodes: Mapping[str, Node]) -> tuple[str, ...]:
    """The names of the levels from the prompts to a row space, its own name last."""
    return (BATCH,) if space == BATCH else (*levels(nodes[space].inside, nodes), space)


def scores_rows(node: Node) -> bool:
    """Whether a node may score responses: it reads their texts, and makes a value for each row."""
    if node.kind in ("train", "filter") or node.makes_rows or not (node.makes_value and node.has_rows):
        return False
    asked = [choice for value in node.inputs for choice in choices(value.annotation) if names_fields(choice)]
    return any(members(WithTexts).keys() <= members(choice).keys() for choice in asked if choice is not Rollout)


def _scored_behind(node: Node) -> tuple[str, ...]:
    """The row spaces on whose scores a node's value depends; its own too if the value is scores."""
    return (*node.follows, node.space) if scores_rows(node) else node.follows


def _space_of(value: str, placed: Mapping[str, Node]) -> str:
    return placed[value].space if value in placed else BATCH


def _apart(node: Node, through: Mapping[str, str], inside: str, placed: Mapping[str, Node]) -> Iterator[Problem]:
    """Problems of values whose rows are not above the deepest rows that a node reads, but in another branch."""
    for space in through:
        if space not in levels(inside, placed):
            read = [f"of `{each}` (in `{through[each]}`)" for each in through if each in (space, inside)]
            text = f"mixes rows {' and '.join(read)}, and neither are below the others. Read one as `Each` in a"
            yield node.problem(f"{text} node above both, or join them in a node that returns `NewRows`")


def _not_below(node: Node, through: Mapping[str, str], inside: str, placed: Mapping[str, Node]) -> Iterator[Problem]:
    """Problems of values that are read as `Each` and have no row below those that the node sees."""
    for name in node.each:
        space = _space_of(name, placed)
        if name in placed and not placed[name].has_rows:
            yield node.problem(f"reads `{name}` as Each, and it is one number for all rows. Read it plainly")
        elif not through:
            text = f"reads only `Each`, such as `{name}`, so it has no rows of its own above them. Read a value of"
            yield node.problem(f"{text} those plainly too, such as `batch: Grouped`")
            return
        elif space == inside:
            text = f"reads `{name}` as Each, and `{through[inside]}` of the same rows plainly. Read both plainly, or"
            yield node.problem(f"{text} both as Each")
        elif inside not in levels(space, placed):
            text = f"reads `{name}` as Each, and its rows, of `{space}`, are not below those of `{inside}` (in"
            yield node.problem(f"{text} `{through[inside]}`). Read a value of rows above both plainly")
