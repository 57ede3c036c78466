"""The types of values: their names as a user writes them, and whether one fits where another is wanted."""

from __future__ import annotations

import dataclasses
import types
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from rlflow.values.cuts import PerSample, PerToken, Rows, Scalar, Texts

_ALIASES = {"PerSample": PerSample, "PerToken": PerToken, "Scalar": Scalar, "Rows": Rows, "Texts": Texts}


def type_name(annotation: Any) -> str:
    """The type as a user writes it: `PerSample`, `Rollout`, `PerToken | None`."""
    for name, alias in _ALIASES.items():
        if annotation == alias:
            return name
    if get_origin(annotation) is dict:
        return f"dict[{', '.join(map(type_name, get_args(annotation)))}]"
    if len(choices(annotation)) > 1:
        return " | ".join(type_name(choice) for choice in choices(annotation))
    if annotation is types.NoneType:
        return "None"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def choices(annotation: Any) -> tuple[Any, ...]:
    """The types that a union is of; of another type that one."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def fields(annotation: Any) -> dict[str, Any]:
    """The types of the fields and properties of a value of this type; none of a tensor, which has no parts."""
    if not dataclasses.is_dataclass(annotation) or not isinstance(annotation, type):
        return {}
    hints = get_type_hints(annotation, include_extras=True)
    properties = {name: value for name, value in vars(annotation).items() if isinstance(value, property)}
    of_properties = {name: get_type_hints(value.fget).get("return", Any) for name, value in properties.items()}
    return {field.name: hints[field.name] for field in dataclasses.fields(annotation)} | of_properties


def accepts(wanted: Any, made: Any) -> bool:
    """Whether a value of type `made` may be passed where `wanted` is written; `Any` fits everything."""
    if wanted is Any or made is Any or wanted == made:
        return True
    if len(choices(wanted)) > 1:
        return any(accepts(choice, made) for choice in choices(wanted))
    plain = get_args(made)[0] if get_origin(made) is Annotated else made
    if getattr(wanted, "_is_protocol", False):  # such as what a model scores: whatever has its properties
        return {name for name, value in vars(wanted).items() if isinstance(value, property)} <= fields(plain).keys()
    if isinstance(wanted, type) and isinstance(plain, type):
        return issubclass(plain, wanted)
    return bool(wanted == plain)
