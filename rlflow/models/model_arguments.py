"""Checks of the arguments of an algorithm's constructor, and handles for those that are models."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Literal, get_args, get_origin

from rlflow.dag.annotations import choices, hints_of
from rlflow.errors import UserError
from rlflow.models.handle import ModelHandle


def check_fields(module: object) -> None:
    """Check the fields of a dataclass against their types.

    Raises:
        UserError: A field is none of the choices of its type. Or it is an instance of a subclass of its type that sets
            a field which its type lacks, such as a `Clip` with `dual` where `Bounds` is wanted. Or the class sets an
            inherited field in its body, where the constructor does not see it.
    """
    name, hints = type(module).__name__, hints_of(type(module))
    for field in dataclasses.fields(module) if dataclasses.is_dataclass(module) else ():
        value = getattr(type(module), field.name, field.default)
        if field.default is not dataclasses.MISSING and value is not field.default:
            raise UserError(
                f"{name} sets `{field.name}` to {value!r:.80} in its body, and its constructor sets another value;"
                f" write it as a field, `{field.name}: ... = ...`, and `@dataclass(eq=False)` above {name}"
            )
        hint = hints.get(field.name)
        legal = get_args(hint) if get_origin(hint) is Literal else ()
        if legal and getattr(module, field.name) not in legal:
            known = ", ".join(map(str, legal))
            raise UserError(f"`{field.name}` is {getattr(module, field.name)!r}; give one of {known}")
        _check_part(name, field.name, hint, getattr(module, field.name))


def _check_part(owner: str, name: str, wanted: Any, part: Any) -> None:
    """Refuse an instance of a subclass of `wanted` that sets a field of the subclass, which nothing would read."""
    if not (isinstance(wanted, type) and dataclasses.is_dataclass(wanted) and isinstance(part, wanted)):
        return
    known = {field.name for field in dataclasses.fields(wanted)}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name not in known and value != field.default:
            raise UserError(
                f"`{name}.{field.name}` is {value}, which {owner} has no use for: its `{name}` is a {wanted.__name__}"
                f" ({', '.join(sorted(known))}); leave it out"
            )


def make_models(module: object) -> None:
    """Make a handle of each argument that is the name of a model.

    Raises:
        UserError: An argument that should be a model is neither a name nor a handle.
    """
    for name, kind in model_parameters(type(module)).items():
        value = getattr(module, name, None)
        if isinstance(value, str):
            setattr(module, name, kind(value))
        elif value is not None and not isinstance(value, kind):
            raise UserError(f"`{name}` is {value!r:.80}, which is not a {kind.__name__}; give one")


def model_parameters(cls: type) -> dict[str, type[ModelHandle]]:
    """The arguments of a constructor that are models: their classes by name."""
    hints = hints_of(cls) | hints_of(inspect.getattr_static(cls, "__init__"))
    found = {name: _kind(hints[name]) for name in inspect.signature(cls).parameters if name in hints}
    return {name: kind for name, kind in found.items() if kind is not None}


def _kind(annotation: Any) -> type[ModelHandle] | None:
    kinds = (choice for choice in choices(annotation) if isinstance(choice, type) and issubclass(choice, ModelHandle))
    return next(kinds, None)
