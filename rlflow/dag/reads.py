"""Which fields of a value a node reads, found in its source: what is not read somewhere need not travel there.

A field counts as read where the source says `rollout.loss_mask`; where the value is handed to a function whose
parameter is annotated with a protocol, as those of model handles are, what the protocol names; and where it is handed
to a method of the module or a function, what that one reads. Any other use reads everything.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, get_type_hints

from rlflow.dag.call import Call
from rlflow.dag.node import Node
from rlflow.values.batch import Pairs
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout

Fields = frozenset[str]

_SCORED = frozenset({"prompt_ids", "response_ids", "lengths", "loss_mask"})  # what the trainer itself reads
_COMPARED = frozenset({"prompt_ids", "response_ids", "lengths", "loss_mask", "logprobs", "version"})  # the gap alarm


def fields_read(module: object, node: Node, value: str, annotation: Any, trained: bool) -> Fields | None:
    """The fields of `value` that `node` and the framework around it read; None for all.

    Args:
        module: Whose node it is.
        node: A node that reads the value.
        value: Its name.
        annotation: Its type.
        trained: Whether the node's role is: what it says of samples is compared with the logprobs that they came with.
    """
    if not dataclasses.is_dataclass(annotation) or annotation is Ragged or node.kind == "rollout":
        return None
    if node.kind == "train" and annotation is Pairs:
        return None
    found = _Source(module, annotation).of_node(node, value)
    if found is None:
        return None
    names = {field.name for field in dataclasses.fields(annotation)}
    if node.kind == "train" and "loss_mask" in names:
        found |= _SCORED
    if trained and annotation is Rollout:
        found |= _COMPARED
    if annotation is Rollout and _replays(module, node):
        found |= {"experts"}
    return found & names


def _replays(module: object, node: Node) -> bool:
    """Whether the node's role trains with the experts that a rollout came with."""
    handle = getattr(module, node.role) if node.role is not None else None
    return getattr(handle, "replays_routing", False)


@dataclass(frozen=True)
class _Where:
    """The function in which a value is used: the names that it binds, and the parent of each node of its source."""

    function: FunctionType
    local: frozenset[str]
    parents: dict[ast.AST, ast.AST]


class _Source:
    """Reads the source of a module's nodes, and of what they hand a value of type `annotation` to."""

    def __init__(self, module: object, annotation: Any) -> None:
        self._module = module
        self._names = {field.name for field in dataclasses.fields(annotation)}
        self._annotation = annotation
        self._seen: set[tuple[Any, str]] = set()

    def of_node(self, node: Node, value: str) -> Fields | None:
        """The fields that the node's own source reads of a value."""
        called = vars(self._module).get(node.id)
        if isinstance(called, Call):
            reads = [read for read in called.reads if read.value == value]
            parts = [
                frozenset({read.field}) if read.field else self._of_parameter(called.function, read.parameter)
                for read in reads
            ]
            return _union(parts)
        return self._of_parameter(getattr(type(self._module), node.id), value)

    def _of_parameter(self, function: Any, parameter: str) -> Fields | None:
        """What a function reads of one of its parameters."""
        if (function, parameter) in self._seen:
            return frozenset()
        self._seen.add((function, parameter))
        protocol = _protocol(function, parameter)
        if protocol is not None:
            return protocol
        body = _body(function)
        return None if body is None else _union(list(self._uses(function, body, parameter)))

    def _uses(self, function: FunctionType, body: ast.FunctionDef, parameter: str) -> Iterator[Fields | None]:
        parents = {child: parent for parent in ast.walk(body) for child in ast.iter_child_nodes(parent)}
        local = _names_bound(body)
        for use in ast.walk(body):
            if isinstance(use, ast.Name) and use.id == parameter:
                yield self._of_use(_Where(function, local, parents), use)

    def _of_use(self, where: _Where, use: ast.Name) -> Fields | None:
        parents = where.parents
        parent = parents[use]
        if not isinstance(use.ctx, ast.Load):
            return None
        if isinstance(parent, ast.Attribute):
            return self._of_attribute(parent.attr) if isinstance(parent.ctx, ast.Load) else None
        if isinstance(parent, ast.keyword) and parent.arg is not None:
            call = parents[parent]
            return self._of_call(where, call, parent.arg) if isinstance(call, ast.Call) else None
        if isinstance(parent, ast.Call) and use in parent.args:
            return self._of_call(where, parent, parent.args.index(use))
        return None

    def _of_attribute(self, name: str) -> Fields | None:
        """A field, or what a property of the value reads."""
        if name in self._names:
            return frozenset({name})
        found = inspect.getattr_static(self._annotation, name, None)
        if not isinstance(found, property) or not isinstance(found.fget, FunctionType):
            return None
        return self._of_parameter(found.fget, next(iter(inspect.signature(found.fget).parameters)))

    def _of_call(self, where: _Where, call: ast.Call, place: int | str) -> Fields | None:
        """What the function that is called reads of the argument at this place, or of this name."""
        called, is_method = self._called(where, call.func)
        if called is None or any(isinstance(argument, ast.Starred) for argument in call.args):
            return None
        parameters = list(inspect.signature(called).parameters.values())[is_method:]
        if isinstance(place, int):
            if place >= len(parameters) or parameters[place].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
                return None
            place = parameters[place].name
        named = any(parameter.name == place for parameter in parameters)
        return self._of_parameter(called, place) if named else None

    def _called(self, where: _Where, expression: ast.expr) -> tuple[FunctionType | None, bool]:
        """The function that `self.method`, `self.handle.method` or `function` names, and whether it is a method."""
        if isinstance(expression, ast.Name):
            found: Any = None if expression.id in where.local else where.function.__globals__.get(expression.id)
            return (found if isinstance(found, FunctionType) else None), False
        if not isinstance(expression, ast.Attribute):
            return None, False
        match expression.value:
            case ast.Name(id="self"):
                owner: Any = self._module
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
                owner = getattr(self._module, attribute, None)
            case _:
                return None, False
        found = inspect.getattr_static(type(owner), expression.attr, None)
        own = expression.attr in getattr(owner, "__dict__", {})
        return (found if isinstance(found, FunctionType) and not own else None), True


def _union(parts: list[Fields | None]) -> Fields | None:
    every: Fields = frozenset()
    for part in parts:
        if part is None:
            return None
        every |= part
    return every


def _protocol(function: Any, parameter: str) -> Fields | None:
    """What the protocol names with which the parameter is annotated."""
    try:
        annotation = get_type_hints(function).get(parameter)
    except (NameError, TypeError):  # a type that is imported for checkers alone
        return None
    if not getattr(annotation, "_is_protocol", False):
        return None
    return frozenset(name for name in vars(annotation) if not name.startswith("_"))


def _body(function: Any) -> ast.FunctionDef | None:
    """The source of a function; None where there is none, or nothing but a stub."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):  # typed at a prompt, a lambda, a class
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    rest = [statement for statement in tree.body if not _says_nothing(statement)]
    return tree if rest else None


def _names_bound(body: ast.FunctionDef) -> frozenset[str]:
    """The names that a function binds itself, which hide those of its module."""
    walked = list(ast.walk(body))
    stored = {each.id for each in walked if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    defined = {each.name for each in walked if isinstance(each, ast.FunctionDef | ast.ClassDef) and each is not body}
    imported = {
        alias.asname or alias.name
        for each in walked
        if isinstance(each, ast.Import | ast.ImportFrom)
        for alias in each.names
    }
    return frozenset(stored | defined | imported | {each.arg for each in walked if isinstance(each, ast.arg)})


def _says_nothing(statement: ast.stmt) -> bool:
    """A docstring or `...`."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
