"""The data buffer: the values of a step on the ranks that made them, and their exchange to ranks that read them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from rlflow.databuffer.exchange import ValueExchange
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError
from rlflow.values.column_kinds import ColumnKind
from rlflow.values.columns import Parts, columns, nbytes, with_path
from rlflow.values.layout import Layout
from rlflow.values.not_sent import NotSent
from rlflow.values.path import RowPath
from rlflow.values.ragged import Ragged


class DataBuffer:
    """One rank's part of the distributed buffer.

    A value is made in one layout and may be read in another. The ranks of the first layout `put` the value; ranks that
    only read it `put` None. Then the ranks of both layouts `issue` the exchange; all ranks issue their exchanges in the
    same order. A rank of the second layout calls `get` when it needs the value.

    Args:
        transport: Transport of this rank.

    Attributes:
        bytes_sent: Bytes of values sent to other ranks.
        bytes_received: Bytes of values received from other ranks, counted when a value is read.
        waited_s: Seconds that this rank waited for exchanges.
        peak_held_bytes: The largest `held_bytes` so far.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._values: dict[str, _Made] = {}
        self.bytes_sent = self.bytes_received = self.peak_held_bytes = 0
        self.waited_s = 0.0

    def put(
        self,
        name: str,
        value: Any,
        annotation: Any,
        space: RowSpace,
        layout: Layout,
    ) -> None:
        """Store a value, in place of an older one of this name; its rows get their paths from `space`.

        Args:
            name: Name of the value.
            value: Rows in the order of `space.held(layout, rank)`; None on ranks outside `layout`.
            annotation: Type of the value.
            space: Row space of the value.
            layout: Layout in which the value was made.

        Raises:
            UserError: The value is not of its annotated type, has another number of rows than this rank holds, or is
                narrower than its longest response.
        """
        if name in self._values:
            self.free(name)
        if isinstance(value, dict):
            value = Parts(value)
        if value is not None:
            held = space.held(layout, self._transport.rank)
            _check(name, value, annotation, space.lengths[held])
            value = with_path(value, annotation, space.paths(held), self._transport.device)
        self._values[name] = _Made(value, annotation, space, layout, nbytes(value, annotation))
        self._note_peak()

    def issue(
        self, name: str, target: Layout, space: RowSpace | None = None, columns: Collection[str] | None = None
    ) -> None:
        """Start to send a value to the ranks of `target`; called by the ranks of both layouts.

        Args:
            name: Name of the value.
            target: Layout in which it is read.
            space: Row space of the reader; None for the value's. If it is below the value's, each row of the
                value is repeated for the rows below it; if it is above, the value is read as `Each`.
            columns: Fields of the value that are read there, the same on all ranks; None for all fields that are not
                marked `OnDemand`. Other fields are `NotSent`, except where a rank reads just the rows that it holds.
        """
        made = self._values[name]
        reader = made.space if space is None else space  # not `or`: a space without rows is falsy
        if (target, reader) == (made.layout, made.space):
            return
        assert (target, reader) not in made.copies, f"`{name}` was sent to {target} before"
        rank = self._transport.rank
        route = made.space.route(rank, made.layout, target, reader)
        with self._waiting(name, target):
            held = made.space.held(made.layout, rank)
            everyone = made.space.paths()
            exchange = ValueExchange(
                self._transport, route, made.space.lengths, held, made.annotation, made.value, columns, everyone
            )
        made.copies[target, reader] = exchange
        self.bytes_sent += exchange.bytes_sent
        self._note_peak()

    def get(self, name: str, layout: Layout, space: RowSpace | None = None) -> Any:
        """The value in `layout`; waits for the exchange that `issue` started.

        If this rank reads just the rows that it holds, in their order, this is the object that was put. Else it is a
        new object, the same for all who read the value in this layout.

        Args:
            name: Name of the value.
            layout: Layout in which it is read.
            space: Row space of the reader, as in `issue`; None for the value's.
        """
        made = self._values[name]
        reader = made.space if space is None else space  # not `or`: a space without rows is falsy
        if (layout, reader) == (made.layout, made.space):
            return made.value
        copy = made.copies[layout, reader]
        if not copy.finished:
            self._finish(name, layout, copy)
        return copy.result

    def space(self, name: str) -> RowSpace:
        """The row space of a value."""
        return self._values[name].space

    def holds(self, name: str, space: RowSpace | None = None) -> bool:
        """Whether a value of this name was put; if `space` is given, whether it was put with this row space."""
        return name in self._values and space in (None, self._values[name].space)

    def clear(self) -> None:
        """Remove all values."""
        self.free(*self._values)

    def free(self, *names: str) -> None:
        """Remove values and their copies, after waiting for exchanges that still send or receive them."""
        for name in names:
            for (layout, _), copy in self._values.pop(name).copies.items():
                if not copy.finished:
                    with self._waiting(name, layout):
                        copy.wait()

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors and messages held now."""
        return sum(
            made.nbytes + sum(copy.held_bytes for copy in made.copies.values()) for made in self._values.values()
        )

    def _finish(self, name: str, layout: Layout, exchange: ValueExchange) -> None:
        with self._waiting(name, layout):
            exchange.wait()
        if self._transport.watch is not None:
            self._transport.watch.flight(_label(name, layout), exchange.begun, time.perf_counter())
        exchange.finish()
        self.bytes_received += exchange.bytes_received
        self._note_peak()

    def _waiting(self, name: str, layout: Layout) -> AbstractContextManager[None]:
        return self._transport.clock.waiting(partial(self._waited, _label(name, layout)))

    def _waited(self, label: str, begin: float, end: float) -> None:
        self.waited_s += end - begin
        if self._transport.watch is not None:
            self._transport.watch.wait(label, begin, end)

    def _note_peak(self) -> None:
        self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)


@dataclass(frozen=True)
class _Made:
    """A value in the layout in which it was made, and its copies by layout and row space of the reader."""

    value: Any
    annotation: Any
    space: RowSpace
    layout: Layout
    nbytes: int
    copies: dict[tuple[Layout, RowSpace], ValueExchange] = field(default_factory=dict)


_TYPES = {
    ColumnKind.SAMPLE: Tensor,
    ColumnKind.TOKEN: Tensor,
    ColumnKind.SCALAR: Tensor,
    ColumnKind.RAGGED: Ragged,
    ColumnKind.JSON: list,
    ColumnKind.PARTS: dict,
    ColumnKind.PATH: RowPath,
}
_SHAPES = {
    ColumnKind.SAMPLE: ("B",),
    ColumnKind.TOKEN: ("B", "T"),
    ColumnKind.SCALAR: (),
}  # dimensions that a tensor has at least


def _label(name: str, layout: Layout) -> str:
    return f"{name}/{layout.shard_by}{layout.shards}"


def _check(name: str, value: Any, annotation: Any, lengths: Tensor) -> None:
    """Refuse a value that is not of its annotated type, or does not fit rows of these response lengths `[B]`."""
    rows, longest = len(lengths), int(lengths.max()) if len(lengths) else 0
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        _check_type(f"`{name}`", value, annotation)
    for column in columns(annotation):
        data = column.of(value)
        place = f"`{name}.{column.name}`" if column.name else f"`{name}`"
        if isinstance(data, NotSent) or (column.kind is ColumnKind.PATH and data is None):
            continue
        _check_type(place, data, _TYPES[column.kind])
        if isinstance(data, Tensor) and data.dim() < len(_SHAPES[column.kind]):
            shape = ", ".join(_SHAPES[column.kind])
            raise UserError(
                f"{place} has shape {list(data.shape)} and is annotated {column.kind.value}: return [{shape}]"
            )
        if column.kind is ColumnKind.PARTS:
            _check_parts(place, data, rows)
            continue
        if column.kind is not ColumnKind.SCALAR and len(data) != rows:
            raise UserError(f"{place} has {len(data)} rows where {rows} were read; return one for each, in their order")
        if column.kind is ColumnKind.TOKEN and data.shape[1] < longest:
            raise UserError(
                f"{place} is {data.shape[1]} tokens wide and the longest response has {longest}; "
                "return [B, T] over the response tokens, right-padded"
            )


def _check_parts(place: str, parts: dict[str, Tensor], rows: int) -> None:
    """Refuse parts that are not one number a row each, all of one dtype."""
    if not parts:
        raise UserError(f"{place} has no part; return at least one, `[B]` by its name")
    first = next(iter(parts.values()))
    for name, part in parts.items():
        _check_type(f"{place}[{name!r}]", part, Tensor)
        if list(part.shape) != [rows] or part.dtype != first.dtype:
            raise UserError(
                f"{place}[{name!r}] has shape {list(part.shape)} and is {_dtype(part)} where {rows} rows were read and"
                f" its first part is {_dtype(first)}; return one number for each row, [B], all of one dtype"
            )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_type(place: str, data: Any, expected: type) -> None:
    if not isinstance(data, expected):
        raise UserError(
            f"{place} is a {type(data).__name__} and is annotated as {expected.__name__}; make the two agree"
        )
