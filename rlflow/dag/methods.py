"""Reads the nodes of a module: its methods marked `@node`, and the functions that its config calls."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType, NoneType
from typing import Any, get_args, get_type_hints

from rlflow.dag.annotations import type_name, without_new_rows
from rlflow.dag.node import BATCH, MARK, ROLLOUT, Call, Input, Kind, Mark, Node, Problem, TypeMark
from rlflow.errors import did_you_mean
from rlflow.values.column_kinds import ColumnKind, PerSample, PerToken
from rlflow.values.columns import columns
from rlflow.values.rollout import Rollout


def marks(cls: type) -> dict[str, Mark]:
    """The `@node` marks of a class's methods by name, in the order of declaration, base classes first."""
    attributes = [item for each in reversed(cls.__mro__) for item in vars(each).items()]
    return {name: getattr(value, MARK) for name, value in attributes if _is_marked(value)}


def read_methods(module: object) -> tuple[dict[str, Node], list[str], list[Problem]]:
    """Read the nodes of the instance `module`: its marked methods, and its config's calls, which replace methods.

    Mistakes are not raised: `Graph.read` reports them together with those of `checks`.

    Returns:
        Three values. The nodes by name, in the order of declaration: base classes first; an override stays where the
        base class declared it. The names of nodes that were set to None. A problem for each mistake in a single method,
        such as a parameter `*args` or a missing return type.
    """
    nodes: dict[str, Node] = {}
    removed: list[str] = []
    problems: list[Problem] = []
    own = vars(module)
    declared = marks(type(module))
    calls = [name for name, value in own.items() if isinstance(value, Call)]
    for name in dict.fromkeys([*declared, *calls]):
        chosen = own.get(name)
        if isinstance(chosen, Call):
            reading = _Reading(name, chosen.function, chosen.mark, chosen)
        else:
            definitions = [vars(cls)[name] for cls in type(module).__mro__ if name in vars(cls)]
            marked = next(value for value in definitions if _is_marked(value))
            chosen = own.get(name, definitions[0])
            if chosen is None:
                removed.append(name)
                continue
            plain = isinstance(chosen, FunctionType) and name not in own
            reading = _Reading(name, chosen if plain else inspect.unwrap(marked), getattr(marked, MARK))
            if not plain:
                text = f"`{name}` is a {type(chosen).__name__}, not a plain method, so the node of that name cannot run"
                reading.wrong.append(f"{text}. Rename the attribute, or set it to None to remove the node")
        node = reading.node()
        if node.id != BATCH:  # `_Reading` reports it; nodes that read `batch` mean the dataset's rows
            nodes[node.id] = node
        problems += [Problem(node.file, node.line, text) for text in reading.wrong]
    for cls in reversed(type(module).__mro__):
        problems += _defined_twice(cls, declared)
    return nodes, removed, problems


def _is_marked(value: Any) -> bool:
    return isinstance(getattr(value, MARK, None), Mark)


def _defined_twice(cls: type, names: dict[str, Mark]) -> Iterator[Problem]:
    """Nodes whose name is twice in one class body, where Python silently keeps the last."""
    if names.keys().isdisjoint(vars(cls)):
        return
    with contextlib.suppress(OSError, TypeError, SyntaxError):  # a class typed at a prompt has no source to read
        source, start = inspect.getsourcelines(cls)
        body = ast.parse(textwrap.dedent("".join(source))).body[0]
        first: dict[str, int] = {}
        for statement in getattr(body, "body", ()):
            if isinstance(statement, ast.FunctionDef) and statement.name in names:
                line = start + statement.lineno - 1
                if statement.name in first:
                    text = f"`{statement.name}` is defined before, in line {first[statement.name]} of the same class"
                    text += ", and only this last definition counts. Rename or delete one"
                    yield Problem(inspect.getfile(cls), line, text)
                first[statement.name] = line


class _Reading:
    """Reads one function's mark, parameters and return type into a `Node`.

    Args:
        name: The node's name.
        function: The method, or the function that a config calls.
        mark: The arguments of `@node`.
        call: The config's entry, which gives the values of parameters; None for a method.

    Attributes:
        wrong: A text for each mistake, filled by `node`.
    """

    def __init__(self, name: str, function: Callable[..., Any], mark: Mark, call: Call | None = None) -> None:
        code = inspect.unwrap(function).__code__
        self.name = name
        self.function = function
        self.mark = mark
        self.call = call
        self.file, self.line = code.co_filename, code.co_firstlineno
        self.wrong: list[str] = []

    def node(self) -> Node:
        """The node; a type that cannot be read is `Any` in it, so that later checks do not report it again."""
        if self.name == BATCH:
            self.wrong.append("a node may not be called `batch`, the name of the dataset's rows. Rename it")
        hints = self._hints()
        inputs = tuple(self._inputs(hints or {}))
        kind = self._kind()
        returns, grows = (Any, False) if hints is None else self._returns(hints, kind)
        role = None if self.mark.role == ROLLOUT else self.mark.role
        marked = (self.mark.generates, self.mark.uses)
        return Node(self.name, inputs, role, kind, returns, self.file, self.line, *marked, grows)

    def _hints(self) -> dict[str, Any] | None:
        try:
            hints = get_type_hints(self.function, include_extras=True)
        except (NameError, AttributeError, TypeError, SyntaxError) as error:  # annotations are the user's own code
            self.wrong.append(f"the types of `{self.name}` cannot be read: {error}. Import or correct them")
            return None
        return hints if self.call is None or self.call.returns is None else {**hints, "return": self.call.returns}

    def _inputs(self, hints: dict[str, Any]) -> Iterator[Input]:
        parameters = list(inspect.signature(self.function).parameters.values())
        if self.call is None and (not parameters or parameters[0].name != "self"):
            self.wrong.append(f"the first parameter of `{self.name}` is not `self`. Add it: a node is a plain method")
        elif self.call is None:
            del parameters[0]
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                bare = parameter.replace(annotation=parameter.empty, default=parameter.empty)
                text = f"parameter `{bare}` of `{self.name}` is {parameter.kind.description}"
                text += ", and values are passed by name"
                self.wrong.append(f"{text}. Write each value that is read as a parameter of its own")
            elif self.call is None:
                required = parameter.default is parameter.empty
                yield Input.of(parameter.name, required, hints.get(parameter.name, Any))
            elif parameter.name in self.call.reads:
                value, _, part = self.call.reads[parameter.name].partition(".")
                required = parameter.default is parameter.empty or parameter.name in self.call.renamed
                yield Input.of(value, required, hints.get(parameter.name, Any), part)

    def _kind(self) -> Kind:
        mark = self.mark
        legal = get_args(TypeMark)
        if mark.type is not None and mark.type not in legal:
            text = f"`type={mark.type!r}` of `{self.name}` is not {' or '.join(map(repr, legal))}."
            self.wrong.append(text + did_you_mean(str(mark.type), legal))
        generates = mark.role == ROLLOUT or bool(mark.generates)
        if mark.generates and mark.role is not None:
            text = f"`{self.name}` has `generates={' and '.join(map(repr, mark.generates))}` and `role={mark.role!r}`"
            self.wrong.append(f"{text}; a node generates or has a role. Score in a node of its own")
        if mark.type is not None and generates and (mark.type == "filter" or mark.generates):
            does = "trains" if mark.type == "train" else "is a filter"
            text = f"`{self.name}` {does} and generates, and what samples cannot choose or train"
            self.wrong.append(f"{text}. Generate in a node of its own, and read that")
        if mark.type in ("train", "filter"):
            return mark.type
        if generates:
            return "rollout"
        return "compute" if mark.role is None else "model_inference"

    def _returns(self, hints: dict[str, Any], kind: Kind) -> tuple[Any, bool]:
        """The type of the node's value without `NewRows`, and whether it was `NewRows`: whether it makes new rows."""
        returns, grows = without_new_rows(hints.get("return", Any))
        value_type = self._value_type({**hints, "return": returns} if grows else hints, kind)
        if grows and kind != "compute":
            does = {"rollout": "generates", "train": "trains", "filter": "is a filter"}.get(kind, "has a role")
            text = f"`{self.name}` returns {type_name(hints['return'])} and {does}; rows are made of others without"
            self.wrong.append(f"{text} a model. Make them in a node of their own, `@node` alone")
        elif (
            grows
            and value_type not in (Any, NoneType)
            and all(column.kind is not ColumnKind.PATH for column in columns(value_type))
        ):
            text = f"`{self.name}` returns {type_name(hints['return'])}, which has no `path`, and so no row that is"
            self.wrong.append(f"{text} above a new one. Give the type a field `path: RowPath`")
        return value_type, grows

    def _value_type(self, hints: dict[str, Any], kind: Kind) -> Any:
        """The type of the node's value; `Any`, with a text in `wrong`, if it does not say how it is cut by rows."""
        if "return" not in hints:
            text = f"`{self.name}` has no return type, which says how its value is cut by rows"
            self.wrong.append(f"{text}. Write `-> PerSample`, `-> PerToken` or a frozen dataclass of them")
            return Any
        returns = hints["return"]
        if kind == "train":
            if returns not in (PerToken, PerSample):
                text = f"`{self.name}` trains and returns {type_name(returns)}; a loss is cut by rows"
                self.wrong.append(f"{text}. Return it unreduced, `-> PerToken` or `-> PerSample`")
                return Any
            return returns
        if kind == "filter" and returns != PerSample:
            text = f"`{self.name}` is a filter and returns {type_name(returns)}; it says of each row whether it is kept"
            self.wrong.append(f"{text}. Return one bool a row, `-> PerSample`")
            return Any
        if kind == "rollout" and not (isinstance(returns, type) and issubclass(returns, Rollout)):
            text = f"`{self.name}` generates and returns {type_name(returns)}"
            self.wrong.append(f"{text}, not `Rollout`. Return what `generate` makes, and compute in another node")
            return Any
        try:
            columns(returns)
        except (TypeError, NameError) as error:
            self.wrong.append(f"`{self.name}` returns {type_name(returns)}, which cannot be cut by rows: {error}")
            return Any
        return returns
