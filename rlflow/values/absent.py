"""What stands in a value for a field that was not sent along."""

from __future__ import annotations

from typing import Any

from rlflow.errors import UserError


class Absent:
    """Stands in a value for a field that was not sent, since the type that a node asks for does not name it.

    Any use raises, so that a field which was overlooked is never silently empty or unequal. Three things Python decides
    without asking the object: `is`, such as `is None`, is False; `isinstance` too; and it can be assigned, copied,
    pickled and shown, as `<texts: not sent here>`, so that a value which has it can be.

    Args:
        field: Its name.
        instead: What to write where the field is needed.
    """

    __slots__ = ("_field", "_instead")

    def __init__(self, field: str, instead: str = "") -> None:
        object.__setattr__(self, "_field", field)
        object.__setattr__(self, "_instead", instead or f"let the type of a node's parameter name `{field}`")

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UserError(f"`{self._field}` was not sent here; {self._instead}")

    def __repr__(self) -> str:
        return f"<{self._field}: not sent here>"

    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else repr(self)

    def __reduce__(self) -> Any:
        return Absent, (self._field, self._instead)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks of any object, such as how to copy it
            raise AttributeError(name)
        return self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        every = [each for some in given for each in (some if isinstance(some, list | tuple) else [some])]
        next(each for each in every if isinstance(each, Absent))._refuse()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __bool__ = __len__ = __iter__ = __reversed__ = __contains__ = __getitem__ = __setitem__ = __delitem__ = _refuse
    __setattr__ = __delattr__ = __call__ = __enter__ = __exit__ = _refuse
    __int__ = __float__ = __complex__ = __index__ = __round__ = __array__ = _refuse
    __neg__ = __pos__ = __abs__ = __invert__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refuse
