"""The columns of a value: how they follow from its type, and how their rows are taken, joined and moved."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from rlflow.errors import UserError, did_you_mean
from rlflow.values.column_kinds import ColumnKind, OnDemand, PerSample
from rlflow.values.host_copy import joined, on_device, on_host, rows_at
from rlflow.values.not_sent import NotSent
from rlflow.values.path import RowPath
from rlflow.values.ragged import Ragged

NOT_MADE: Any = object()  # the default of an optional column; the value gets an empty column in its place
_OPTIONAL = "rlflow"  # key of a field's metadata


@dataclass(frozen=True)
class Column:
    """One column of a value, such as `logprobs` of a `Rollout`: `Column("logprobs", ColumnKind.TOKEN)`.

    All code that packs, sends, cuts, joins, stores or compares values works column by column. The columns follow from
    the type of the value alone. So a new column is named where it is declared, made and read, and nowhere else.

    Attributes:
        name: The field's name; "" where the value is a bare tensor.
        kind: Kind of the column, which gives its shape: `[B, ...]`, `[B, T, ...]`, see `ColumnKind`.
        on_demand: Whether it is marked `OnDemand`, so that it is sent only to nodes that name it in their types.
        entry: Dtype of the entries, or type of the JSON objects, of a column that need not be made; else None.
        model_input: See `optional`.
    """

    name: str
    kind: ColumnKind
    on_demand: bool = False
    entry: Any = None
    model_input: Literal["per token", "any", "output layer"] | None = None

    def of(self, value: Any) -> Any:
        """The column's data in a value: a field, or the value itself where that is a bare tensor."""
        return getattr(value, self.name) if self.name else value

    def asked(self, only: Collection[str] | None) -> bool:
        """Whether a node in another layout reads the column.

        Args:
            only: The columns that the node reads; None for all that are not marked `OnDemand`.
        """
        return not self.on_demand if only is None else self.name in only

    def sent(self, only: Collection[str] | None) -> bool:
        """Whether rows of the column are sent to that node; paths are known there, and a scalar has no rows."""
        return self.asked(only) and self.kind not in (ColumnKind.SCALAR, ColumnKind.PATH)

    @property
    def per_read_token(self) -> bool:
        """Whether the column is ragged, with an entry for each token that a model reads."""
        return self.kind is ColumnKind.RAGGED and self.model_input == "per token"

    def empty(self, like: Tensor) -> Any:
        """The column of a value that was made without it: zeros, empty rows, or empty objects; `like` is `[B, T]`."""
        if self.kind is ColumnKind.JSON:
            return [self.entry() for _ in like]
        if self.kind is ColumnKind.RAGGED:
            return Ragged(like.new_zeros(0, dtype=self.entry), like.new_zeros(len(like), dtype=torch.int64))
        return like.new_zeros(like.shape if self.kind is ColumnKind.TOKEN else len(like), dtype=self.entry)


def optional(entry: torch.dtype | type, model_input: Literal["per token", "any", "output layer"] | None = None) -> Any:
    """Declare an optional column: it may be left out when the value is constructed, and is empty then.

    Args:
        entry: Dtype of its entries, or the type of its JSON objects.
        model_input: Way in which a model reads the column, which is then packed and sent with the tokens of its rows.
            `per token`: a ragged column has an entry for each token that the model reads (prompt and response without
            the last token), a `PerToken` column has one for each response token. `any`: a row of a ragged column has
            any number of entries, such as patches of images. `output layer`: as `any`, and only the output layer reads
            it, so it is not packed. None: no model reads it.
    """
    return dataclasses.field(default=NOT_MADE, metadata={_OPTIONAL: {"entry": entry, "model_input": model_input}})


def fill_in(value: Any, rows: str) -> None:
    """Give a frozen value empty columns where optional ones were left out, with the rows of its column `rows`."""
    for column in columns(type(value)):
        if column.of(value) is NOT_MADE:
            like = getattr(value, rows)
            object.__setattr__(value, column.name, column.empty(like.lengths if isinstance(like, Ragged) else like))


def columns(annotation: Any) -> tuple[Column, ...]:
    """The columns of a value of this annotated type; the type None has none.

    Raises:
        TypeError: The type is none of `PerSample`, `PerToken`, `Scalar`, `Rows`, `Texts`, `Ragged`,
            `dict[str, PerSample]`, `RowPath`, nor a frozen dataclass of them.
    """
    if annotation is NoneType:
        return ()
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation) and annotation is not Ragged:
        return _columns_of(annotation)
    return (_column("", annotation),)


@functools.cache  # asked for at every cut, exchange and join of rows
def _columns_of(annotation: type) -> tuple[Column, ...]:
    hints = get_type_hints(annotation, include_extras=True)
    return tuple(
        dataclasses.replace(_column(field.name, hints[field.name]), **field.metadata.get(_OPTIONAL, {}))
        for field in dataclasses.fields(annotation)
    )


def _column(name: str, annotation: Any) -> Column:
    if annotation is Ragged:
        return Column(name, ColumnKind.RAGGED)
    if annotation == dict[str, PerSample]:
        return Column(name, ColumnKind.PARTS)
    if annotation in (RowPath, RowPath | None):
        return Column(name, ColumnKind.PATH)
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    kinds = [mark for mark in marks if isinstance(mark, ColumnKind)]
    if not kinds:
        place = f"field `{name}`" if name else "the value"
        legal = "PerSample, PerToken, Ragged, Rows, Texts or dict[str, PerSample]"
        raise TypeError(f"{place} is {annotation!r}; rows can be cut of {legal} only")
    return Column(name, kinds[0], OnDemand in marks)


def countable(value: Any, annotation: Any) -> list[Tensor]:
    """The tensors of a value that are not floating point; the host reads these to count and cut rows."""
    found = [tensor for column in columns(annotation) for tensor in _tensors(column.of(value))]
    return [tensor for tensor in found if not tensor.is_floating_point()]


def nbytes(value: Any, annotation: Any) -> int:
    """Bytes of the tensors of a value, without its path; 0 for None."""
    every = () if value is None else columns(annotation)
    return sum(
        tensor.nbytes for column in every if column.kind is not ColumnKind.PATH for tensor in _tensors(column.of(value))
    )


def _tensors(data: Any) -> list[Tensor]:
    """The tensors of one column; texts have none."""
    if isinstance(data, Tensor):
        return [data]
    if isinstance(data, Ragged):
        return [data.values, data.lengths]
    if isinstance(data, RowPath):
        return [data.numbers]
    return list(data.values()) if isinstance(data, dict) else []


def take_rows(value: Any, annotation: Any, index: Tensor) -> Any:
    """The rows of a value at `index` `[K]` int64, in that order; padding keeps its width."""
    return _columnwise([value], annotation, lambda data, kind: _take(data[0], kind, index))


def join_rows(values: Sequence[Any], annotation: Any) -> Any:
    """The rows of one or more values of this type, in order; `PerToken` columns get the width of the widest."""
    return _columnwise(values, annotation, _join)


def trim(value: Any, annotation: Any, longest: int) -> Any:
    """The value with its `PerToken` columns cut at the `longest` response; what is cut off is padding."""
    return _columnwise(
        [value], annotation, lambda data, kind: data[0][:, :longest] if kind is ColumnKind.TOKEN else data[0]
    )


def _columnwise(values: Sequence[Any], annotation: Any, change: Callable[[list[Any], ColumnKind], Any]) -> Any:
    """A value of this type, each of its columns made from those of `values`."""
    kinds = {column.name: column.kind for column in columns(annotation)}
    if "" in kinds:
        return change(list(values), kinds[""])
    changed = {}
    for name, kind in kinds.items():
        data = [getattr(value, name) for value in values]
        absent = next((each for each in data if isinstance(each, NotSent)), None)
        changed[name] = change(data, kind) if absent is None else absent
    return dataclasses.replace(values[0], **changed)


def _take(column: Any, kind: ColumnKind, index: Tensor) -> Any:
    if kind is ColumnKind.SCALAR:
        return column
    if kind in (ColumnKind.RAGGED, ColumnKind.PATH):
        return column.take(index)
    if kind is ColumnKind.JSON:
        return [column[i] for i in on_host(index).tolist()]
    if kind is ColumnKind.PARTS:
        return Parts({name: rows_at(part, index) for name, part in column.items()})
    return rows_at(column, index)


def _join(parts: list[Any], kind: ColumnKind) -> Any:
    assert kind is not ColumnKind.SCALAR, "one number is not of rows"
    if kind is ColumnKind.PATH and any(part is None for part in parts):  # rows that belong to no step
        return None
    if kind is ColumnKind.JSON:
        return [entry for part in parts for entry in part]
    if kind is ColumnKind.PARTS:
        return Parts({name: _join([part[name] for part in parts], ColumnKind.SAMPLE) for name in parts[0]})
    filled = [part for part in parts if len(part)] or parts[:1]  # a part without rows may have any shape and dtype
    if kind in (ColumnKind.RAGGED, ColumnKind.PATH):
        return functools.reduce(type(filled[0]).followed_by, filled)
    if kind is ColumnKind.TOKEN:
        widest = max(part.shape[1] for part in filled)
        filled = [
            torch.cat([part, part.new_zeros(len(part), widest - part.shape[1], *part.shape[2:])], dim=1)
            for part in filled
        ]
    return joined(filled)


def to_device(value: Any, device: torch.device) -> Any:
    """The value with its tensors on `device`, see `on_device`; lists stay as they are."""
    if isinstance(value, Tensor):
        return on_device(value, device)
    if isinstance(value, dict):
        return type(value)({name: to_device(part, device) for name, part in value.items()})
    if type(value) is tuple:
        return tuple(to_device(part, device) for part in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    moved = {field.name: to_device(getattr(value, field.name), device) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **moved)


def with_path(value: Any, annotation: Any, path: RowPath, device: torch.device) -> Any:
    """The value with `path` as the path of its rows; the same object where its rows have that path already."""
    for column in columns(annotation):
        if column.kind is not ColumnKind.PATH:
            continue
        there = getattr(value, column.name)
        known = isinstance(there, RowPath) and there.levels == path.levels
        if not (known and torch.equal(on_host(there.numbers), path.numbers)):
            value = dataclasses.replace(value, **{column.name: to_device(path, device)})
    return value


class Parts(dict[str, Tensor]):
    """Numbers of each sample by name, `[B]` each, such as the parts of a reward; nodes write `dict[str, PerSample]`."""

    def __missing__(self, name: str) -> Tensor:
        raise UserError(
            f"a node reads part `{name}`, which the reward lacks; its parts are [{', '.join(self)}]."
            f"{did_you_mean(name, self)} Give the reward that part, or read another"
        )
