"""The types of values: their names as a user writes them, and whether one fits where another is wanted."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Generic, Protocol, Union, get_args, get_origin, get_type_hints

from rlflow.errors import did_you_mean
from rlflow.values.column_kinds import ColumnKind, PerSample, PerToken, Rows, Scalar, Texts
from rlflow.values.each import Each, OwnRows
from rlflow.values.ragged import Ragged

_ALIASES = {"PerSample": PerSample, "PerToken": PerToken, "Scalar": Scalar, "Rows": Rows, "Texts": Texts}


def type_name(annotation: Any) -> str:
    """The type as a user writes it: `PerSample`, `Rollout`, `PerToken | None`."""
    for name, alias in _ALIASES.items():
        if annotation == alias:
            return name
    if get_origin(annotation) is Each:
        return f"Each[{', '.join(map(type_name, get_args(annotation)))}]"
    if get_origin(annotation) is Annotated and OwnRows in get_args(annotation):
        return f"NewRows[{type_name(without_new_rows(annotation)[0])}]"
    if get_origin(annotation) is dict:
        return f"dict[{', '.join(map(type_name, get_args(annotation)))}]"
    if len(choices(annotation)) > 1:
        return " | ".join(type_name(choice) for choice in choices(annotation))
    if annotation is types.NoneType:
        return "None"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def choices(annotation: Any) -> tuple[Any, ...]:
    """The types of a union; for any other type, that type alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def hints_of(annotated: Any) -> dict[str, Any]:
    """The types of a class's fields or a function's parameters; empty if one of them cannot be resolved."""
    try:
        return get_type_hints(annotated)
    except (NameError, AttributeError, TypeError, SyntaxError):
        return {}


def without_each(annotation: Any) -> tuple[Any, bool]:
    """Split `Each` off a parameter's type: return the type without it, and whether it was there."""
    found = choices(annotation)
    if Each not in [get_origin(choice) or choice for choice in found]:
        return annotation, False
    plain = tuple(get_args(choice)[0] if get_origin(choice) is Each else choice for choice in found)
    return (Any if Each in plain else Union[plain]), True  # noqa: UP007 - the types are known only at run time


def without_new_rows(annotation: Any) -> tuple[Any, bool]:
    """Split `NewRows` off a node's return type: return the type without it, and whether it was there."""
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    if OwnRows not in marks:
        return annotation, False
    plain, others = get_args(annotation)[0], tuple(mark for mark in marks if mark is not OwnRows)
    return (Annotated[plain, *others] if others else plain), True


def fields(annotation: Any) -> Mapping[str, Any]:
    """The types of the fields and properties of a value of this type, by name; empty for a tensor."""
    if not dataclasses.is_dataclass(annotation) or not isinstance(annotation, type):
        return {}
    return _fields(annotation)


def names_fields(annotation: Any) -> bool:
    """Whether the members of a type name fields of a value: a protocol, a dataclass, or a plain annotated class."""
    if not isinstance(annotation, type) or annotation is Ragged:
        return False
    if Protocol in annotation.__mro__ or dataclasses.is_dataclass(annotation):
        return True
    return annotation.__bases__ == (object,) and bool(vars(annotation).get("__annotations__"))


@cache  # called for every read of a value, at every step
def members(annotation: type) -> Mapping[str, Any]:
    """The members of such a type in order: fields and properties with their types, methods with `Any`."""
    hints = get_type_hints(annotation, include_extras=True)
    methods = {name: Any for name, value in _attributes(annotation) if isinstance(value, types.FunctionType)}
    written = {name for cls in _own(annotation) for name in vars(cls).get("__annotations__", {})}
    annotated = {name: hint for name, hint in hints.items() if name in written and get_origin(hint) is not ClassVar}
    found = annotated | _properties(annotation) | methods
    return MappingProxyType({name: hint for name, hint in found.items() if not name.startswith("_")})


def misfits(wanted: type, made: Any) -> Iterator[str]:
    """A text for each member of `wanted` that a value of type `made` lacks, or has as another type."""
    known, name = fields(made), type_name(made)
    for member, hint in members(wanted).items():
        if member not in known:
            if not hasattr(made, member):
                has = did_you_mean(member, known) or (f" It has {', '.join(known)}." if known else "")
                yield f"`{member}`, and {name} has no such field.{has}"
        elif not accepts(hint, known[member]):
            yield f"`{member}` as {type_name(hint)}, and it is {type_name(known[member])} in {name}. Correct one"


def accepts(wanted: Any, made: Any) -> bool:
    """Whether a value of type `made` may be passed where `wanted` is written; `Any` fits everything."""
    if wanted is Any or made is Any or wanted == made:
        return True
    if len(choices(wanted)) > 1:
        return any(accepts(choice, made) for choice in choices(wanted))
    plain = get_args(made)[0] if get_origin(made) is Annotated else made
    if get_origin(wanted) is Annotated:
        return bool(get_args(wanted)[0] == plain) and _cuts(wanted) == _cuts(made)
    if isinstance(wanted, type) and isinstance(plain, type) and not _is_protocol(wanted) and issubclass(plain, wanted):
        return True
    if names_fields(wanted):
        return isinstance(plain, type) and not any(misfits(wanted, plain))
    return bool(wanted == plain)


@cache
def _fields(annotation: type) -> Mapping[str, Any]:
    hints = get_type_hints(annotation, include_extras=True)
    of_fields = {field.name: hints[field.name] for field in dataclasses.fields(annotation)}
    return MappingProxyType(of_fields | _properties(annotation))


def _cuts(annotation: Any) -> list[Any]:
    return [mark for mark in get_args(annotation)[1:] if isinstance(mark, ColumnKind)]


def _is_protocol(annotation: Any) -> bool:
    return bool(getattr(annotation, "_is_protocol", False))


def _own(annotation: type) -> list[type]:
    """The classes whose members a type has, base classes first."""
    return [cls for cls in reversed(annotation.__mro__) if cls not in (object, Protocol, Generic)]


def _attributes(annotation: type) -> list[tuple[str, Any]]:
    return [item for cls in _own(annotation) for item in vars(cls).items()]


def _properties(annotation: type) -> dict[str, Any]:
    """The types of the properties of a class."""
    found = {name: value for name, value in _attributes(annotation) if isinstance(value, property)}
    return {name: get_type_hints(value.fget, include_extras=True).get("return", Any) for name, value in found.items()}
