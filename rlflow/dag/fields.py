"""The fields of a value that a node reads, from the type of its parameter; only these are sent to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from rlflow.dag.annotations import accepts, choices, members, names_fields, type_name
from rlflow.dag.node import Input, Node
from rlflow.values.batch import Pairs
from rlflow.values.columns import Column, columns
from rlflow.values.not_sent import NotSent
from rlflow.values.path import RowPath
from rlflow.values.protocols import Sampled, TokensWithLossMask, fields_behind
from rlflow.values.rollout import Rollout


@dataclass(frozen=True)
class FieldsRead:
    """The fields of a value that a node reads, and why.

    Attributes:
        node: The node's id.
        value: The value's name.
        asked: The types of the node's parameters for this value, as a user writes them.
        named: The fields that these types name, in the value's order; "" for a value that has no fields.
        added: Fields that the framework itself reads in addition to these, by reason.
    """

    node: str
    value: str
    asked: str
    named: tuple[str, ...]
    added: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def names(self) -> frozenset[str]:
        """All fields that are read: `named` and `added`."""
        return frozenset(self.named).union(*(fields for _, fields in self.added))

    def seen(self, value: Any) -> Any:
        """The value as the node gets it on any rank: fields that it does not read are `NotSent`.

        Paths stay, since every rank that has rows knows their paths.
        """
        if not dataclasses.is_dataclass(value) or "" in self.named or isinstance(value, type):
            return value
        names = [field.name for field in dataclasses.fields(value) if field.name not in self.names]
        hidden = [name for name in names if not isinstance(getattr(value, name), RowPath)]
        return dataclasses.replace(value, **{name: self._absent(name, value) for name in hidden}) if hidden else value

    def _absent(self, field: str, value: Any) -> NotSent:
        wider = type(value).__name__
        if field not in _plain(columns(type(value))):
            wider = "RolloutWithTexts" if isinstance(value, Rollout) else "rlflow.types.WithDatasetRows"
        asked = f"`{self.node}` reads `{self.value}: {self.asked}`, a type that does not ask for it"
        own = f"a Protocol of your own that names `{field}` too"
        return NotSent(field, f"{asked}. Write `{self.value}: {wider}`, or {own}")

    def __str__(self) -> str:
        said = [", ".join(self.named)] if self.named and "" not in self.named else []
        return "; ".join([*said, *(f"{why}: {', '.join(fields)}" for why, fields in self.added)])


def fields_read(module: object, node: Node, value: str, made: Any, watched: Collection[str]) -> FieldsRead:
    """The fields of `value` that `node` and the framework around it read.

    Args:
        module: Module that the node belongs to.
        node: A node that reads the value.
        value: Name of the value.
        made: Type of the value.
        watched: Models whose log-probabilities of samples are compared with the engine's, which the samples have.
    """
    every = columns(made)
    inputs = [each for each in node.inputs if each.name == value]
    asked = ", ".join(dict.fromkeys(_written(each) for each in inputs))
    of_models = {column.name for column in every if column.model_input == "any"}  # which no node reads itself
    named = {name for each in inputs for name in _named(each, made, every)} - of_models
    framework = _framework(module, node, made, every, watched)
    in_order = tuple(column.name for column in every if column.name in named)
    added, known = [], set(in_order)
    for why, fields in framework:
        more = tuple(column.name for column in every if column.name in fields and column.name not in known)
        known.update(more)
        added += [(why, more)] if more else []
    return FieldsRead(node.id, value, asked, in_order, tuple(added))


def _written(read: Input) -> str:
    if read.field:
        return f"{read.name}.{read.field}"
    written = type_name(read.annotation)
    return f"Each[{written}]" if read.each else written


def _named(read: Input, made: Any, every: Sequence[Column]) -> Iterator[str]:
    """The fields that one parameter asks for."""
    if read.field:
        yield from _behind(read.field, made, every)
        return
    for choice in choices(read.annotation):
        if choice is NoneType or not accepts(choice, made):
            continue
        if not names_fields(choice) or not names_fields(made):
            yield from _plain(every)
        elif choice in made.__mro__:
            yield from (name for name in _plain(every) if name in members(choice))
        else:
            for name in members(choice):
                yield from _behind(name, made, every)


def _plain(every: Sequence[Column]) -> Iterator[str]:
    """The fields that a value's own type asks for: all that are not marked `OnDemand`."""
    return (column.name for column in every if not column.on_demand)


def _behind(member: str, made: Any, every: Sequence[Column]) -> Iterator[str]:
    """The fields behind a member: the field itself, or those from which a property or a method is computed."""
    if any(column.name == member for column in every):
        yield member
        return
    fields = fields_behind(getattr(made, member, None))
    yield from _plain(every) if fields is None else fields


def _framework(
    module: object, node: Node, made: Any, every: Sequence[Column], watched: Collection[str]
) -> Iterator[tuple[str, Sequence[str]]]:
    """The fields that the framework reads in addition to the node, each with a reason."""
    handles = [getattr(module, name, None) for name in (node.role, *node.uses) if name is not None]
    if node.kind == "rollout":
        policies = [getattr(module, name, None) for name in node.generates]
        read = {name for policy in policies for name in getattr(policy, "model_inputs", ())}
        yield "samples carry it on", [each.name for each in every if each.model_input != "any" or each.name in read]
    if node.grows:
        yield "rows carry it on", [each.name for each in every if each.model_input == "any"]
    if node.kind == "train" and made is Pairs:
        yield "a loss is of it", ("prompt_ids", "chosen_ids", "rejected_ids")
    if node.kind == "train" and any(column.name == "loss_mask" for column in every):
        yield "a loss is of it", list(members(TokensWithLossMask))
    sampled = isinstance(made, type) and issubclass(made, Rollout)
    called = [name for name in (node.role, *node.uses) if name is not None and name in watched]
    if sampled and any(hasattr(getattr(module, name, None), "watch") for name in called):
        yield "compared with the engine's logprobs", list(members(Sampled))
    for column in every:
        asked = (column.name in getattr(handle, "model_inputs", ()) for handle in handles)
        if column.model_input is not None and any(asked):
            yield f"its model reads these {column.name}", (column.name,)
