"""The graph of an algorithm, read from its module and checked before any process starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, KeysView, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from rlflow.dag import checks
from rlflow.dag.fields import FieldsRead, fields_read
from rlflow.dag.methods import read_methods
from rlflow.dag.node import BATCH, Input, Node
from rlflow.dag.order import block, in_order
from rlflow.dag.problems import GraphError, Problem
from rlflow.dag.row_spaces import levels, scores_rows, with_rows
from rlflow.errors import UserError
from rlflow.values.columns import columns

__all__ = ["Graph", "GraphError", "Input", "Node", "Problem"]


@dataclass(frozen=True)
class Graph:
    """The nodes of an algorithm: an edge leads from a node to every node that has a parameter of its name.

    Attributes:
        nodes: By name, in the order of declaration: base classes first; an override keeps its place.
        order: The order of execution: by depth, then declaration, train nodes last; a filter and its ancestors first.
        averages: By handle that is a moving average: the handle that it follows.
        fields: By node and value that it reads: which fields of the value, and why.
    """

    nodes: Mapping[str, Node]
    order: tuple[Node, ...]
    averages: Mapping[str, str] = field(default_factory=dict, repr=False)
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
        """Read and check the graph of `module`, the instance: a node set to None in `__init__` is not part of it.

        Args:
            module: An instance of a class with methods marked `@node`, or with calls in place of some or all of them.
            roles: The names of its model handles.
            policies: Which of the handles are language models, which can generate; None for all.
            averages: By handle that is a moving average: the handle that it follows.
            drops: Whether samples that the module's reward fails on are dropped.

        Raises:
            GraphError: All that is wrong, each with file and line.
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
            *checks.missing(nodes, removed, type(module)),
            *checks.mistyped(nodes),
            *checks.mispaired(nodes),
            *checks.miscast(nodes, roles),
            *checks.misgenerated(nodes, roles, policies),
            *checks.misused(nodes, roles),
            *checks.unmasked(nodes),
            *checks.misfiltered(nodes),
            *cycles,
            *mixed,
            *checks.mislaid(order, nodes),
        ]
        if problems:
            raise GraphError(*sorted(problems, key=lambda problem: (problem.file, problem.line)))
        made = cls(nodes, order, averages)
        reads = ((node, value) for node in made.order for value in node.reads)
        watched = {*made.trained_roles(), *(policy for policy in made.policies() if policy in averages)}
        fields = {
            (node.id, value): fields_read(module, node, value, made.type_of(value), watched) for node, value in reads
        }
        return replace(made, fields=fields)

    @property
    def filter(self) -> Node | None:
        """The node that says which groups of rows a step keeps."""
        return next((node for node in self.order if node.kind == "filter"), None)

    @property
    def block(self) -> tuple[Node, ...]:
        """The filter's ancestors and the filter, in the order of execution: what repeats until a step is full."""
        repeated = block(self.nodes)
        return tuple(node for node in self.order if node.id in repeated)

    def readers(self, value: str) -> tuple[Node, ...]:
        """The nodes that read `value`, in the order of execution."""
        return tuple(node for node in self.order if value in node.reads)

    def columns(self, value: str, readers: Collection[Node]) -> tuple[str, ...] | None:
        """The fields of `value` that these readers read together, in the order of its type.

        None for all but those that are marked `Home`.
        """
        read = frozenset[str]().union(*(self.fields[reader.id, value].names for reader in readers))
        every = columns(self.type_of(value))
        if read == {column.name for column in every if not column.home}:
            return None
        return tuple(column.name for column in every if column.name in read)

    def seen(self, node: Node, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that `node` is called with, by name, each with the fields that it reads; others are absent."""
        return {name: self.fields[node.id, name].seen(value) for name, value in values.items()}

    def trained_roles(self) -> tuple[str, ...]:
        """The roles that train nodes train, each once, in the order of execution."""
        return tuple(dict.fromkeys(node.role for node in self.order if node.kind == "train" and node.role is not None))

    def changed_by(self, node: Node) -> tuple[str, ...]:
        """The models whose weights a node changes: the role it trains first; the last that does, its averages too."""
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
        """How often each model's weights have changed in the step when a node runs."""
        before = self.order[: self.order.index(node)]
        return Counter(name for other in before for name in self.changed_by(other))

    def policies(self) -> tuple[str, ...]:
        """What nodes generate with, each once, in the order of execution."""
        return tuple(dict.fromkeys(policy for node in self.order for policy in node.generates))

    def type_of(self, value: str) -> Any:
        """The annotated type of a value as its node declares it; of `batch` as its readers do: `Batch` or `Pairs`."""
        return checks.type_of_batch(self.nodes) if value == BATCH else self.nodes[value].returns

    def space_of(self, value: str) -> str:
        """The rows of a value: `batch`, or the id of the node that made them."""
        return BATCH if value == BATCH else self.nodes[value].space

    def seen_in(self, node: Node, value: str) -> str:
        """The rows in which `node` sees a value: its own; of a value without rows the value's."""
        rowless = value != BATCH and not self.nodes[value].has_rows
        return self.space_of(value) if rowless else node.inside

    def levels(self, space: str) -> tuple[str, ...]:
        """The names of the rows on the way from prompts to those of a space, its own last."""
        return levels(space, self.nodes)

    def marked_by(self, node: Node) -> tuple[str, ...]:
        """The rows, some of which a node's scoring may drop; none where nothing follows from its scores."""
        followed = any(node.space in other.follows for other in self.order)
        return (node.space,) if followed and scores_rows(node) else ()

    def roles(self) -> KeysView[str]:
        """The roles that nodes score with, use or train, in the order of declaration: alike on every rank.

        And averages that nodes generate with, whose weights are nowhere but with those that they follow.
        """
        used = [role for node in self.nodes.values() for role in (node.role, *node.uses)]
        used += [policy for node in self.nodes.values() for policy in node.generates if policy in self.averages]
        return dict.fromkeys(role for role in used if role is not None).keys()


def _with_policy(node: Node, order: Sequence[Node], policies: Collection[str]) -> Node:
    """`node`, which generates with the first policy that is trained where it does not say with which."""
    if node.kind != "rollout" or node.generates:
        return node
    trained = (str(other.role) for other in order if other.kind == "train")
    return replace(node, generates=tuple(role for role in trained if role in policies)[:1])


def _without_absent(node: Node, known: Collection[str]) -> Node:
    """`node` without the optional inputs that nobody makes, which keep their defaults."""
    present = [value for value in node.inputs if value.required or value.name in known]
    return replace(node, inputs=tuple(present))
