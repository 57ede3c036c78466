"""The placeholder for a field of a value that was not sent."""

from __future__ import annotations

from typing import Any

from rlflow.errors import UserError


class NotSent:
    """Placeholder for a field that was not sent, since the type of the node's parameter does not name it.

    It can be held, copied, pickled and shown. Any other use raises a `UserError`.

    Args:
        field: Name of the field.
        instead: Advice at the end of the error; by default, to name the field in the type of a parameter.
    """

    def __init__(self, field: str, instead: str = "") -> None:
        self._field = field
        self._instead = instead or f"let the type of a node's parameter name `{field}`"

    def _refuse(self, *_: Any) -> Any:
        raise UserError(f"`{self._field}` was not sent here; {self._instead}")

    def __repr__(self) -> str:
        return f"<{self._field}: not sent here>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks of any object, such as how to copy it
            raise AttributeError(name)
        return self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        every = [each for some in given for each in (some if isinstance(some, list | tuple) else [some])]
        next(each for each in every if isinstance(each, NotSent))._refuse()

    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __hash__ = __float__ = __index__ = __array__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __invert__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __and__ = __or__ = __matmul__ = __mod__ = __floordiv__ = _refuse
