"""From the entries of a config to calls on the module, which the graph then reads as it reads methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from torch import Tensor

from rlflow.dag.annotations import accepts, choices, type_name
from rlflow.dag.call import Call, Read
from rlflow.dag.entry import Entry
from rlflow.dag.methods import marks
from rlflow.dag.node import ROLLOUT, Mark, names
from rlflow.dag.problems import Problem
from rlflow.errors import UserError, did_you_mean
from rlflow.module import RLModule, handles
from rlflow.values.cuts import PerSample, PerToken, Scalar
from rlflow.workflow.callables import found_at, hints_of, typed

RETURNS = {"PerSample": PerSample, "PerToken": PerToken, "Scalar": Scalar}
MARKS = ("role", "type", "generates", "uses")


def bind(module: RLModule) -> list[Problem]:
    """Give a module the nodes of its config, once it has its models.

    Returns:
        What is wrong with single nodes. A node that is wrong stands in the graph as far as it is known, so that others
        do not miss it.
    """
    problems: list[Problem] = []
    for entry in module.config_nodes:
        _put(module, entry, problems)
    return problems


def _put(module: RLModule, entry: Entry, problems: list[Problem]) -> None:
    """Set the attribute of one entry: a call, or None to remove a node."""
    declared, name = marks(type(module)), type(module).__name__
    written = vars(module).get(entry.id)
    if entry.keys.get("remove"):
        if entry.id in declared or "call" in entry.keys:
            setattr(module, entry.id, None)
        else:
            known = [*declared, *(other.id for other in module.config_nodes if other is not entry)]
            why = did_you_mean(entry.id, known) or f" The nodes are {', '.join(known)}."
            problems.append(entry.problem(f"is removed, and {name} has no node of that name.{why}", "remove"))
    elif "call" not in entry.keys:
        text = "has no `call`, the dotted path of the function that makes it"
        if entry.id in declared:
            text = f"{text}, and a node of {name}'s own is replaced as a whole. Write one"
        else:
            known = [other.id for other in module.config_nodes if "call" in other.keys]
            text = f"{text}, and no config before writes it. Add it.{did_you_mean(entry.id, known)}"
        problems.append(entry.problem(text))
    elif not entry.id.isidentifier():
        problems.append(entry.problem("is no name that a parameter can have. Write letters, digits and _", "id"))
    elif entry.id not in declared and (hasattr(type(module), entry.id) or not isinstance(written, Call | None)):
        problems.append(entry.problem(f"is the name of something else of {name}, which it would hide. Rename it", "id"))
    else:
        setattr(module, entry.id, _Binding(module, entry, problems).call())


@dataclass
class _Binding:
    """One entry on its way to a call."""

    module: RLModule
    entry: Entry
    problems: list[Problem]
    reads: list[Read] = field(default_factory=list)
    bound: dict[str, Any] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)  # whose methods it calls, as far as is known

    def call(self) -> Call:
        """The call, as far as it can be made."""
        path, keys = self.entry.keys["call"], self.entry.keys
        mark = marks(type(self.module)).get(self.entry.id, Mark())
        if any(key in keys for key in MARKS):
            mark = Mark(keys.get("role"), keys.get("type"), names(keys.get("generates")), names(keys.get("uses")))
        function: Callable[..., Any] | None = None
        hints: dict[str, Any] = {}
        try:
            function = found_at(path, self.module)
            hints = hints_of(function, path)
            parameters = inspect.signature(function).parameters
        except UserError as error:
            self.wrong(str(error), "call")
            return Call(_nothing, mark, tuple(self._known_reads()), {}, Any, *self.entry.place)
        if path.split(".")[0] in handles(self.module):
            self.models.append(path.split(".")[0])
        self._arguments(parameters, hints)
        self._check_role(mark)
        return Call(function, mark, tuple(self.reads), self.bound, self._returns(hints), *self.entry.place)

    def wrong(self, text: str, key: str = "") -> None:
        """Tell of a problem."""
        self.problems.append(self.entry.problem(text, key))

    def _known_reads(self) -> list[Read]:
        """What it reads of other nodes, where its function is not known."""
        return [
            Read(parameter, *_split(source), required=True, annotation=Any)
            for parameter, source in (self._dependencies() or {}).items()
            if _split(source)[0] not in handles(self.module)
        ]

    def _dependencies(self) -> dict[str, str] | None:
        """What each parameter gets; None where it is not written, and parameters say it by their names."""
        written = self.entry.keys.get("dependencies")
        return {name: name for name in written} if isinstance(written, list) else written

    def _arguments(self, parameters: Mapping[str, inspect.Parameter], hints: Mapping[str, Any]) -> None:
        path, dependencies = self.entry.keys["call"], self._dependencies()
        settings = self.entry.keys.get("parameters", {})
        for key, given in (("dependencies", dependencies or {}), ("parameters", settings)):
            for name in given:
                if name not in parameters:
                    hint = did_you_mean(str(name), parameters) or f" It takes {', '.join(parameters) or 'nothing'}."
                    text = f"has `{name}` in its `{key}`, and {path} takes no such parameter.{hint}"
                    self.wrong(text, _key(key, name))
                elif key == "parameters" and name in (dependencies or {}):
                    text = f"has `{name}` in its `dependencies` and in its `parameters`. Leave one"
                    self.wrong(text, _key(key, name))
        for name, parameter in parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                text = f"calls {path}, whose parameter `{name}` is {parameter.kind.description}, and values are passed"
                self.wrong(f"{text} by name. Call a function of your own that calls it", "call")
            elif dependencies is not None and name in dependencies:
                self._read(name, dependencies[name], hints.get(name, Any), required=True)
            elif name in settings:
                self._set(name, settings[name], hints.get(name, Any))
            elif name == "self":
                self.bound[name] = self.module
            elif name in handles(self.module) or dependencies is None:
                self._read(name, name, hints.get(name, Any), required=parameter.default is parameter.empty)
            elif parameter.default is parameter.empty:
                text = f"calls {path}, which needs `{name}`, and neither `dependencies` nor `parameters` give it"
                self.wrong(f"{text}. Write it under one of them", "call")

    def _read(self, name: str, source: str, annotation: Any, required: bool) -> None:
        """A parameter that gets a value, a field of one, or a model."""
        found, (value, part) = handles(self.module), _split(source)
        if value not in found:
            self.reads.append(Read(name, value, part, required, annotation))
        elif part:
            text = f"depends on `{source}`, and `{value}` is a model. Call `{source}` in a node of its own"
            self.wrong(f"{text}, or let the function take the model and call it", _key("dependencies", name))
        elif not accepts(annotation, type(found[value])):
            made = f"but the model `{value}` is a {type(found[value]).__name__}"
            self.wrong(f"reads `{name}` as {type_name(annotation)}, {made}. Correct one", _key("dependencies", name))
        else:
            self.models.append(value)
            self.bound[name] = found[value]

    def _set(self, name: str, value: Any, annotation: Any) -> None:
        """A parameter that the config sets."""
        others = [choice for choice in choices(annotation) if choice is not NoneType]
        if annotation is not Any and value is not None and all(accepts(Tensor, choice) for choice in others):
            text = f"has `{name}` in its `parameters`, and it is a {type_name(annotation)}, which nodes make"
            self.wrong(f"{text}. Write under `dependencies` which one", _key("parameters", name))
            return
        try:
            self.bound[name] = typed(name, value, annotation)
        except UserError as error:
            self.wrong(f"has `parameters` that do not fit {self.entry.keys['call']}: {error}", _key("parameters", name))

    def _returns(self, hints: Mapping[str, Any]) -> Any:
        path, written, made = self.entry.keys["call"], self.entry.keys.get("returns"), hints.get("return", Any)
        if written is not None and written not in RETURNS:
            hint = did_you_mean(written, RETURNS) or f" Write {', '.join(RETURNS)}."
            self.wrong(f"has `returns: {written}`, which is no way to cut a value.{hint}", "returns")
            return Any
        if written is None:
            if made is Tensor or made is Any:
                found = "a Tensor, not saying" if made is Tensor else "something that does not say"
                legal = "`returns: PerSample`, `PerToken` or `Scalar`"
                self.wrong(f"calls {path}, which returns {found} how it is cut by rows. Add {legal}", "call")
                return Any
            return made
        if made not in (Tensor, Any, RETURNS[written]):
            self.wrong(f"has `returns: {written}`, and {path} returns {type_name(made)}. Leave it out", "returns")
        return RETURNS[written]

    def _check_role(self, mark: Mark) -> None:
        if self.models and mark.role not in self.models and not set(self.models) <= set(mark.generates):
            found = "has no role" if mark.role is None else f"has the role {mark.role!r}"
            text = f"calls the model `{self.models[0]}` and {found}, so its rows may lie elsewhere"
            self.wrong(f"{text}. Write `role: {self.models[0]}`", "role" if "role" in self.entry.keys else "call")
        if self.entry.keys["call"] == "generate" and mark.role != ROLLOUT and not mark.generates:
            self.wrong("calls generate, and is not marked to. Write `generates: actor`, or `role: rollout`", "call")


def _split(source: str) -> tuple[str, str]:
    """`rollout.group` as the value and its field."""
    value, _, part = source.partition(".")
    return value, part


def _key(section: str, name: Any) -> str:
    return f"{section}.{name}"


def _nothing(**_: Any) -> None:
    """Stands for a function that was not found; such a graph is never run."""
