"""The checks that need the whole graph: values that no node makes, and types, roles and rows that do not fit.

`Graph.read` runs all of them, on every rank, before any model is loaded. Each yields a `Problem` for each mistake and
raises nothing; together they become one `GraphError`, such as

    my_algorithm.py:31: `advantages` reads `reward`, which no node makes. Did you mean "rewards"?

All take the nodes of the graph by name, in the order of declaration.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

from rlflow.dag.annotations import accepts, fields, members, misfits, names_fields, type_name
from rlflow.dag.node import BATCH, ROLLOUT, Input, Node, Problem
from rlflow.errors import did_you_mean
from rlflow.values.batch import Batch, Pairs
from rlflow.values.column_kinds import ColumnKind
from rlflow.values.columns import columns
from rlflow.values.each import new_rows
from rlflow.values.rollout import Rollout


def missing(nodes: Mapping[str, Node], removed: Collection[str], module_class: type) -> Iterator[Problem]:
    """Values that a node reads and no node makes, and `After` inputs that name no train node.

    Args:
        nodes: The graph's nodes.
        removed: The names of nodes that were set to None.
        module_class: The module's class; a method that lacks its `@node` is named as the likely cause.
    """
    values = [BATCH, *nodes]
    methods = [name for name in dir(module_class) if callable(getattr(module_class, name))]
    for node in nodes.values():
        for name in node.reads:
            source = nodes.get(name)
            if name != BATCH and source is None:
                if name in removed:
                    why = "a node that was set to None. Give the parameter a default"
                elif name in methods:
                    why = "a method that is not a node. Mark it with `@node`"
                else:
                    why = "which no node makes." + (
                        did_you_mean(name, values) or f" The values are {', '.join(values)}."
                    )
                yield node.problem(f"reads `{name}`, {why}")
            elif source is not None and not source.makes_value:
                what = "a train node" if source.kind == "train" else "a node that returns None"
                why = f"{what} ({source.place}), which makes no value. Compute what is shared in another node"
                other = f", or write `{name}: After` to come after it" if source.kind == "train" else ""
                yield node.problem(f"reads `{name}`, {why}{other}")
        for name in node.after:
            source = nodes.get(name)
            if source is None or source.kind != "train":
                trains = [other.id for other in nodes.values() if other.kind == "train"]
                why = did_you_mean(name, trains) or f" Those are {', '.join(trains) or 'none'}."
                yield node.problem(f"comes after `{name}`, read as After, and that is not a train node.{why}")


def mistyped(nodes: Mapping[str, Node]) -> Iterator[Problem]:
    """Values that a node reads as another type than their node returns: `x: PerSample` of a node `-> PerToken`."""
    for node in nodes.values():
        for value in node.inputs:
            source = nodes.get(value.name)
            if value.after:
                continue
            if value.each and value.name in (other.name for other in node.inputs if not other.each):
                yield node.problem(f"reads `{value.name}` both as Each and plainly. Read it in one way")
            if value.field:
                made = type_of_batch(nodes) if value.name == BATCH else source.returns if source is not None else Any
                if made is not Any and made is not NoneType:
                    yield from _misread_field(node, value, made)
            elif value.name == BATCH and not _batch_types(value):
                yield from _misread(node, value, type_of_batch(nodes), "it is a Batch, or Pairs. Correct it")
            elif source is not None and source.makes_value and not accepts(value.annotation, source.returns):
                made = f"`{value.name}` returns {type_name(source.returns)} ({source.place})"
                yield from _misread(node, value, source.returns, f"{made}. Correct one")


def _misread(node: Node, read: Input, made: Any, otherwise: str) -> Iterator[Problem]:
    """A problem for each field of the read type that type `made` lacks or has as another type; or one problem."""
    wanted, whole = read.annotation, f"reads `{read.name}` as {type_name(read.annotation)}"
    if names_fields(wanted) and wanted not in (Batch, Pairs, Rollout) and members(wanted).keys() & fields(made).keys():
        yield from (node.problem(f"{whole}, which names {wrong}") for wrong in misfits(wanted, made))
    else:
        yield node.problem(f"{whole}, but {otherwise}")


def _misread_field(node: Node, read: Input, owner: Any) -> Iterator[Problem]:
    """A problem if type `owner` lacks the field that a config's node reads (`rollout.group`), or has another type."""
    whole, known = f"`{read.name}.{read.field}`", fields(owner)
    if read.field not in known:
        why = did_you_mean(read.field, known) or (f" It has {', '.join(known)}." if known else " Read it whole.")
        yield node.problem(f"reads {whole}, and {type_name(owner)} has no such field.{why}")
    elif not accepts(read.annotation, known[read.field]):
        made = f"it is {type_name(known[read.field])}"
        yield node.problem(f"reads {whole} as {type_name(read.annotation)}, but {made}. Correct one")


def mispaired(nodes: Mapping[str, Node]) -> Iterator[Problem]:
    """Nodes that read `batch` as `Pairs` where another reads `Batch`, or that return `PerToken` for rows of pairs."""
    first: tuple[Node, type] | None = None
    for node in nodes.values():
        for value in node.inputs:
            types = _batch_types(value) if value.name == BATCH else ()
            if len(types) != 1:
                continue
            if first is None:
                first = node, types[0]
            elif types[0] is not first[1]:
                other = f"`{first[0].id}` reads it as {first[1].__name__} ({first[0].place})"
                yield node.problem(f"reads `batch` as {types[0].__name__}, but {other}. Make them agree")
    paired = type_of_batch(nodes) is Pairs
    for node in nodes.values():
        if paired and node.space == BATCH and node.kind != "rollout" and _has(node, ColumnKind.TOKEN):
            text = f"returns {type_name(node.returns)} of pairs, and a pair has the tokens of two responses"
            yield node.problem(f"{text}. Return one number or vector for each pair, `-> PerSample`")


def type_of_batch(nodes: Mapping[str, Node]) -> type:
    """The type of the dataset's rows: `Pairs` if a node can read `batch` only as `Pairs`, else `Batch`."""
    types = [_batch_types(value) for node in nodes.values() for value in node.inputs if value.name == BATCH]
    return Pairs if (Pairs,) in types else Batch


def miscast(nodes: Mapping[str, Node], roles: Collection[str]) -> Iterator[Problem]:
    """Train nodes without a role, and roles that name no model handle of the module.

    Args:
        nodes: The graph's nodes.
        roles: The names of the module's model handles.
    """
    for node in nodes.values():
        if node.kind == "train" and node.role is None:
            yield node.problem('trains and has no role. Name the model it trains: `@node(role="...", type="train")`')
        elif node.role not in (None, *roles):
            known = [*roles, ROLLOUT]
            why = did_you_mean(str(node.role), known) or f" The roles are {', '.join(known)}."
            yield node.problem(f"has role {node.role!r}, which names no model handle of the module.{why}")


def misgenerated(nodes: Mapping[str, Node], roles: Collection[str], policies: Collection[str]) -> Iterator[Problem]:
    """Names in `generates=` that name no model handle of the module, or one whose model is not a language model.

    Args:
        nodes: The graph's nodes.
        roles: The names of the module's model handles.
        policies: The names of the handles that are language models.
    """
    for node in nodes.values():
        for policy in node.generates:
            if policy not in roles:
                why = did_you_mean(policy, policies) or f" The language models are {', '.join(policies) or 'none'}."
                yield node.problem(f"generates with {policy!r}, which names no model handle of the module.{why}")
            elif policy not in policies:
                why = f"not a language model; only a CausalLM generates, and those are {', '.join(policies) or 'none'}"
                yield node.problem(f"generates with {policy!r}, which is {why}. Name one of them")


def misused(nodes: Mapping[str, Node], roles: Collection[str]) -> Iterator[Problem]:
    """Names in `uses=` that name no model handle, or one that is trained; and `uses=` of a node without a role.

    Args:
        nodes: The graph's nodes.
        roles: The names of the module's model handles.
    """
    trains = {node.role: node for node in nodes.values() if node.kind == "train"}
    for node in nodes.values():
        if node.uses and node.role is None:
            has = "generates" if node.kind == "rollout" else "has no role"
            text = f"uses `{node.uses[0]}` and {has}; a model is called on the ranks of another"
            yield node.problem(f'{text}. Write `@node(role="{node.uses[0]}")`, or name the role that it lives with')
        for name in node.uses:
            if name not in roles:
                why = did_you_mean(name, roles) or f" The handles are {', '.join(roles)}."
                yield node.problem(f"uses `{name}`, which names no model handle of the module.{why}")
            elif name == node.role:
                yield node.problem(f"uses `{name}`, which is its role. Leave it out of `uses`")
            elif name in trains:
                other = trains[name]
                text = f"uses `{name}`, which `{other.id}` ({other.place}) trains"
                yield node.problem(f"{text}. Score with it in a node of its own, or name a frozen model")


def unmasked(nodes: Mapping[str, Node]) -> Iterator[Problem]:
    """Train nodes that read no value with a `loss_mask`, or several: a loss is masked by exactly one of them."""
    for node in nodes.values():
        masks = masks_of(node, nodes)
        if node.kind == "train" and len(masks) != 1:
            found = f"{len(masks)} values with a `loss_mask` ({', '.join(masks)})" if masks else "none"
            yield node.problem(f"needs one value whose `loss_mask` masks its loss, and reads {found}. Read just one")


def masks_of(node: Node, nodes: Mapping[str, Node]) -> list[str]:
    """The values that a node reads and that have a `loss_mask`, or are `Pairs`: a loss has the rows of such a value."""
    return [name for name in node.reads if _is_trained_on(name, nodes)]


def misfiltered(nodes: Mapping[str, Node], repeated: Collection[str]) -> Iterator[Problem]:
    """A second filter, a filter that reads no rows, and a `Scalar` of one draw that a node after the filter reads.

    Args:
        nodes: The graph's nodes.
        repeated: The filter and its ancestors.
    """
    filters = [node for node in nodes.values() if node.kind == "filter"]
    for node in filters[1:]:
        text = f"is a second filter next to `{filters[0].id}` ({filters[0].place}), and rows are chosen once"
        yield node.problem(f"{text}. Combine the two into one")
    followed = {name for id in repeated for name in nodes[id].after if name in nodes and nodes[name].kind == "train"}
    for name in sorted(followed):
        if filters:
            text = f"trains, and the filter `{filters[0].id}` comes after it, which is asked once a draw and not a step"
            yield nodes[name].problem(f"{text}. Let the filter and what it reads do without `{name}: After`")
    drawn = any(BATCH in nodes[name].reads for name in repeated)
    for node in filters:
        known = [name for name in node.reads if name == BATCH or name in nodes]
        if not drawn or not any(name == BATCH or nodes[name].has_rows for name in known):
            yield node.problem("is a filter and reads neither prompts nor samples. Read the rows that it chooses from")
    for node in nodes.values():
        for name in node.reads if node.id not in repeated else ():
            if name in repeated and _has(nodes[name], ColumnKind.SCALAR):
                made = f"`{name}` ({nodes[name].place}), a Scalar of one draw, and the rows that pass the filter"
                text = (
                    f"reads {made} `{filters[0].id}` are of several. Compute it in a node that comes after the filter"
                )
                yield node.problem(text)


def mislaid(order: Sequence[Node], nodes: Mapping[str, Node]) -> Iterator[Problem]:
    """Train nodes that read rows of another space than their loss, and `NewRows` nodes that read no rows at all."""
    for node in order:
        if node.grows and not node.reads:
            text = f"returns {type_name(new_rows(node.returns))} and reads no rows that the new ones are below"
            yield node.problem(f"{text}. Read those, such as `batch: Batch`")
        if node.kind != "train":
            continue
        for name in node.each:
            text = f"trains and reads `{name}` as Each, and mini-batches are cut by the rows of the loss"
            yield node.problem(f"{text}. Compute what it needs of them in a node of its own")
        space_of = {BATCH: BATCH, **{other.id: other.space for other in order}}
        masks = masks_of(node, nodes)
        if len(masks) == 1 and not node.each and (of := space_of.get(masks[0], BATCH)) != node.inside:
            below = next(name for name in node.reads if space_of.get(name, BATCH) == node.inside)
            text = f"trains on rows of `{of}` (in `{masks[0]}`) and reads `{below}` of rows of `{node.inside}` below"
            yield node.problem(f"{text} them. Read it as Each in a node before, which makes one value for each row")


def _has(node: Node, kind: ColumnKind) -> bool:
    """Whether the node's value has a column that is cut by rows in this way."""
    return node.returns is not Any and any(column.kind is kind for column in columns(node.returns))


def _batch_types(read: Input) -> tuple[type, ...]:
    """The types among `Batch` and `Pairs` that have all fields of an input; both if it names only shared fields."""
    if read.field:
        return tuple(kind for kind in (Batch, Pairs) if read.field in fields(kind))
    return tuple(kind for kind in (Batch, Pairs) if accepts(read.annotation, kind))


def _is_trained_on(name: str, nodes: Mapping[str, Node]) -> bool:
    """Whether a value has a `loss_mask`, or is `Pairs`, whose tokens all count."""
    made = type_of_batch(nodes) if name == BATCH else nodes[name].returns if name in nodes else None
    if made is Any or not isinstance(made, type):
        return False
    return issubclass(made, Pairs) or any(column.name == "loss_mask" for column in columns(made))
