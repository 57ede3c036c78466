"""`@node`, the mark that makes a method a node of the graph; a node's entry in a config; and `Node` itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal, TypeVar, overload

from rlflow.dag.annotations import choices, without_each
from rlflow.errors import UserError
from rlflow.values.column_kinds import ColumnKind, PerSample, PerToken, Scalar
from rlflow.values.columns import columns
from rlflow.values.each import After, Each

Kind = Literal["compute", "model_inference", "rollout", "train", "filter"]
TypeMark = Literal["train", "filter"]
Method = TypeVar("Method", bound=Callable[..., Any])

BATCH = "batch"  # the value that no node makes, the dataset's rows; also the name of their row space
ROLLOUT = "rollout"  # a role that stands for `generates=` the first language model that is trained
MARK = "__rlflow_node__"
CUTS = {"PerSample": PerSample, "PerToken": PerToken, "Scalar": Scalar}


@dataclass(frozen=True)
class Mark:
    """The arguments of `@node`, unchecked: all mistakes of a graph are reported together, by `Graph.read`."""

    role: str | None = None
    type: TypeMark | None = None
    generates: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()


@overload
def node(function: Method, /) -> Method: ...


@overload
def node(
    *,
    role: str | None = None,
    type: TypeMark | None = None,
    generates: str | Sequence[str] = (),
    uses: str | Sequence[str] = (),
) -> Callable[[Method], Method]: ...


def node(
    function: Callable[..., Any] | None = None,
    /,
    *,
    role: str | None = None,
    type: TypeMark | None = None,
    generates: str | Sequence[str] = (),
    uses: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """Mark a method as a node of the graph. Its value has the method's name; its parameters name the values it reads.

    The method itself is returned unchanged. A subclass overrides it without repeating the mark. `name = None` in a
    subclass or on an instance removes the node.

    Args:
        function: The method, if the mark is written without parentheses.
        role: The model handle on `self` with which the node scores, or which it trains; None for a node without a
            model. `rollout` is short for `generates=` the first language model that is trained.
        type: `train` for a loss that trains its role; `filter` for a node that decides which groups the step keeps.
        generates: One or more policies with which the node generates: names of language models on `self`, trained or
            frozen. The responses that the node returns are new rows, children of the rows that it reads.
        uses: One or more frozen model handles on `self` that the node calls in addition to that of its role. They are
            placed on the role's ranks. All ranks of the role must make the same calls.

    Raises:
        UserError: A role was passed without `role=`, as in `@node("actor")`.
    """
    if isinstance(function, str):
        raise UserError(f'`@node("{function}")` names no parameter. Write `@node(role="{function}")`')

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        setattr(method, MARK, Mark(role, type, names(generates), names(uses)))
        return method

    return mark if function is None else mark(function)


def names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """One name, several or none, as a mark or a config writes them."""
    return (given,) if isinstance(given, str) else tuple(given or ())


@dataclass(frozen=True)
class Input:
    """A value that a node reads.

    Attributes:
        name: The value's name.
        required: False where the parameter has a default.
        annotation: The parameter's type; `Any` where none is written.
        field: Field of the value, where a node of a config reads just that; empty for the whole.
        each: Whether the parameter is `Each` of that type, so that it has all rows below those of the node.
        after: Whether it is `After`: the node comes after the train node of that name, and gets no value.
    """

    name: str
    required: bool
    annotation: Any
    field: str = ""
    each: bool = False
    after: bool = False

    @classmethod
    def of(cls, name: str, required: bool, annotation: Any, field: str = "") -> Input:
        """The input that a parameter of this type reads."""
        plain, each = without_each(annotation)
        return cls(name, required, plain, field, each, after=After in choices(annotation))


@dataclass(frozen=True)
class Node:
    """One step of the algorithm; the method, or the call, that runs it is `getattr(module, node.id)`.

    Attributes:
        id: The method's name, which is the name of the value it makes.
        inputs: The values it is called with, by keyword; optional ones that no node makes are left out.
        role: The model handle that it scores with or trains; None for a node without a model, or one that generates.
        kind: Kind of node, which follows from the mark.
        returns: Return type; `Any` where that could not be read.
        file: File in which the method is written, or the config's entry.
        line: The line of its first decorator, or of `def`; for a config's entry, the first line.
        generates: The policies that it generates with.
        uses: The frozen model handles that it calls in addition to its role.
        grows: Whether it makes rows without generating: its return type is `NewRows`.
        space: The row space of its value: `batch`, or the id of the node that made the rows.
        inside: The row space in which it sees the values that it reads.
        follows: The row spaces on whose scores its inputs depend. If samples on which the reward fails are dropped, the
            node is called without them.
    """

    id: str
    inputs: tuple[Input, ...]
    role: str | None
    kind: Kind
    returns: Any
    file: str
    line: int
    generates: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    grows: bool = False
    space: str = BATCH
    inside: str = BATCH
    follows: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the values it reads, each once, in the order of its parameters."""
        return tuple(dict.fromkeys(value.name for value in self.inputs if not value.after))

    @property
    def each(self) -> tuple[str, ...]:
        """The names of the values that it reads as `Each`: of all rows below its own."""
        return tuple(dict.fromkeys(value.name for value in self.inputs if value.each))

    @property
    def after(self) -> tuple[str, ...]:
        """The train nodes that it comes after."""
        return tuple(dict.fromkeys(value.name for value in self.inputs if value.after))

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of the nodes that must run before it: those that it reads, and train nodes that it comes after."""
        return (*self.reads, *self.after)

    @property
    def models(self) -> str:
        """The role, or the policies that it generates with, as text; empty for a node without a model."""
        return self.role or " and ".join(self.generates)

    @property
    def makes_rows(self) -> bool:
        """Whether its value has rows of its own, below those that it sees."""
        return self.kind == "rollout" or self.grows

    @property
    def makes_value(self) -> bool:
        """Whether others can read its value; those of a train node, and of a node that returns None, have none."""
        return self.kind != "train" and self.returns is not NoneType

    @property
    def has_rows(self) -> bool:
        """Whether its value is cut by rows; a value of 0-dim numbers alone is not."""
        return self.returns is Any or any(column.kind is not ColumnKind.SCALAR for column in columns(self.returns))

    @property
    def place(self) -> str:
        """`file:line`, the file relative to the working directory where it lies below it."""
        return place(self.file, self.line)

    def problem(self, text: str) -> Problem:
        """A problem of this node; `text` is what follows the node's name in the message."""
        return Problem(self.file, self.line, f"`{self.id}` {text}")


@dataclass(frozen=True)
class NodeConfig:
    """A node of a config's `nodes`; its name is its key there.

    Attributes:
        call: The function that makes the value: its dotted path, a method of a model (`actor.logprobs`), or a method of
            the module (`generate`).
        role: Role as in `@node`, unless the function is marked with it; for a model's method, the model by default.
        type: Type as in `@node`.
        generates: Policies as in `@node`.
        uses: Model handles as in `@node`.
        inputs: Values, or fields of values (`rollout.group`), for parameters whose names are not those of the values.
        settings: Arguments that are not values of the graph, by parameter.
        returns: Kind of column of the value, for a function that is annotated `Tensor` or not at all.
    """

    call: str
    role: str | None = None
    type: TypeMark | None = None
    generates: str | list[str] | None = None
    uses: str | list[str] | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    returns: Literal["PerSample", "PerToken", "Scalar"] | None = None


@dataclass(frozen=True)
class Call:
    """A node from a config: an attribute of the module that is called like a marked method, with values by name.

    Attributes:
        function: Function that is called.
        mark: Mark that `@node` would make.
        reads: The value that a parameter gets, or `value.field`, by parameter.
        settings: Arguments of other parameters, by parameter.
        renamed: The parameters whose values are named in the config.
        returns: Kind of column of the value, if the config says it; else None.
    """

    function: Callable[..., Any]
    mark: Mark
    reads: Mapping[str, str]
    settings: Mapping[str, Any]
    renamed: frozenset[str] = frozenset()
    returns: Any = None

    def __call__(self, **values: Any) -> Any:
        """Call the function."""
        sources = {parameter: source.partition(".") for parameter, source in self.reads.items()}
        given = {each: _part(values[value], of) for each, (value, _, of) in sources.items() if value in values}
        return self.function(**given, **self.settings)


def _part(value: Any, name: str) -> Any:
    """The field `name` of a value, or of all rows of an `Each`; the value itself if `name` is empty."""
    if name and isinstance(value, Each):
        return Each(getattr(value.values, name), value.counts)
    return getattr(value, name) if name else value


def engine_of(policy: str) -> str:
    """The key in `placement` of the ranks where a policy generates: `actor.rollout`."""
    return f"{policy}.{ROLLOUT}"


@dataclass(frozen=True)
class Problem:
    """One mistake: where it is written, and what was found, why it cannot work, what to do."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{place(self.file, self.line)}: {self.message}"


class GraphError(UserError):
    """All problems of one graph, one line each; `args` are the `Problem`s."""

    def __init__(self, *problems: Problem) -> None:
        assert problems
        super().__init__(*problems)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems, by file and line."""
        return self.args

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        return "\n  ".join([f"{len(self.problems)} problems in the graph:", *map(str, self.problems)])


def place(file: str, line: int) -> str:
    """`file:line` as an editor opens it, the file relative to the working directory where it lies below it."""
    relative = os.path.relpath(file)
    return f"{file if relative.startswith(os.pardir) else relative}:{line}"
