"""What stands in a value for a field that was not sent along."""

from __future__ import annotations

from typing import Any

from rlflow.errors import UserError


class Absent:
    """Stands in a value for a field that was not sent along, since no node that reads the value there reads it.

    Any use raises: a field that was overlooked is never silently empty.

    Args:
        field: Its name.
    """

    __slots__ = ("_field",)

    def __init__(self, field: str) -> None:
        self._field = field

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UserError(
            f"`{self._field}` did not come along to this rank, since no node that reads the value here was found to"
            " read this field. Read it as `value.field` in the node; assigned to a name there, a value comes as a whole"
        )

    def __repr__(self) -> str:
        return f"Absent({self._field!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks of any object, such as how to copy it
            raise AttributeError(name)
        return self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        next(each for each in given if isinstance(each, Absent))._refuse()

    __getitem__ = __len__ = __iter__ = __bool__ = __contains__ = __neg__ = __invert__ = __abs__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __and__ = __rand__ = __or__ = __ror__ = __matmul__ = __rmatmul__ = _refuse
