"""A node that is written in a config: the function that it calls, and what this is called with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.dag.node import MARK, Input, Mark
from rlflow.values.each import Each


@dataclass(frozen=True)
class Read:
    """What one parameter of a function is called with: a value, or a field of it.

    Attributes:
        parameter: The function's.
        value: The id of the node that makes the value, or `batch`.
        field: Of the value; empty for the whole.
        required: False where the parameter's default serves if no node makes the value.
        annotation: The parameter's type; `Any` where none is written.
    """

    parameter: str
    value: str
    field: str
    required: bool
    annotation: Any


@dataclass(frozen=True)
class Call:
    """Stands on a module where a class has a method marked `@node`, and is called like one, with values by name.

    Attributes:
        function: Calls it.
        mark: What `@node` would say.
        reads: What values its parameters get.
        bound: What its other parameters get.
        returns: The type of what it makes; `Any` where that is reported already.
        file: The config, or the option, in which it is written.
        line: Of the file.
    """

    function: Callable[..., Any]
    mark: Mark
    reads: tuple[Read, ...]
    bound: Mapping[str, Any]
    returns: Any
    file: str
    line: int
    inputs: tuple[Input, ...] = field(init=False)

    def __post_init__(self) -> None:
        inputs = (Input.of(read.value, read.required, read.annotation, read.field) for read in self.reads)
        object.__setattr__(self, "inputs", tuple(inputs))
        object.__setattr__(self, MARK, self.mark)

    def __call__(self, **values: Any) -> Any:
        """Call the function."""
        given = {read.parameter: _part(values[read.value], read) for read in self.reads if read.value in values}
        return self.function(**given, **self.bound)


def _part(value: Any, read: Read) -> Any:
    if read.field and isinstance(value, Each):
        return Each(getattr(value.values, read.field), value.counts)
    return getattr(value, read.field) if read.field else value
