"""The values that nodes read and make: what they hold, and how a column of them is cut by rows.

`B` is the number of rows on this rank, `T` the longest response among them. Nothing here knows of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlflow.data.host_copy import is_on_host, joined, on_device, on_host, remember, rows_at
from rlflow.errors import UserError, did_you_mean


class Cut(Enum):
    """How one column is cut by rows, and so how it is packed, padded and masked."""

    SAMPLE = "per sample"  # [B, ...]: one entry a row
    TOKEN = "per token"  # [B, T, ...]: right-padded; a row's entries are its response tokens
    RAGGED = "ragged"  # carries its own lengths
    JSON = "json"  # a list of B JSON-able objects
    SCALAR = "scalar"  # 0-dim: one number for the step, equal on all ranks
    PARTS = "per sample, by name"  # a dict of names to [B] numbers of one dtype


class Home:
    """Mark of a field that stays on the rank that made it: after rows moved away from it, it is None."""


PerSample = Annotated[Tensor, Cut.SAMPLE]
PerToken = Annotated[Tensor, Cut.TOKEN]
Scalar = Annotated[Tensor, Cut.SCALAR]
Rows = Annotated[list[dict[str, Any]], Cut.JSON]
Texts = Annotated[list[str], Cut.JSON]


class Parts(dict[str, Tensor]):
    """Numbers of each sample by name, `[B]` each, such as what a reward is made of; `dict[str, PerSample]` to nodes."""

    def __missing__(self, name: str) -> Tensor:
        raise UserError(
            f"a node reads part `{name}`, which the reward lacks; its parts are [{', '.join(self)}]."
            f"{did_you_mean(name, self)} Give the reward that part, or read another"
        )


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths without padding: `values` `[sum(lengths), ...]`, `lengths` `[B]` int64."""

    values: Tensor
    lengths: Tensor

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """One int64 row for each list."""
        flat = [token for row in rows for token in row]
        return cls(torch.tensor(flat, dtype=torch.int64), torch.tensor([len(row) for row in rows], dtype=torch.int64))

    def __len__(self) -> int:
        return int(self.lengths.numel())

    def rows(self) -> tuple[Tensor, ...]:
        """Views of the rows, in order."""
        return torch.split(self.values, on_host(self.lengths).tolist())

    def take(self, index: Tensor) -> Ragged:
        """The rows at `index` `[K]` int64, in that order."""
        lengths, order = on_host(self.lengths).tolist(), on_host(index).tolist()
        values = _chosen(self.values, lengths, order)
        if is_on_host(self.values):
            remember(values, _chosen(on_host(self.values), lengths, order))
        return Ragged(values, rows_at(self.lengths, index))

    def followed_by(self, other: Ragged) -> Ragged:
        """The rows of both, these first."""
        return Ragged(joined([self.values, other.values]), joined([self.lengths, other.lengths]))


def _chosen(values: Tensor, lengths: list[int], order: list[int]) -> Tensor:
    """The rows `order` of values that are rows of these lengths."""
    rows = torch.split(values, lengths)
    return torch.cat([rows[i] for i in order]) if order else values[:0]


def _padded(values: Tensor, lengths: list[int]) -> Tensor:
    """`[B, T]`: rows of these lengths, right-padded with zeros."""
    return pad_sequence(list(torch.split(values, lengths)), batch_first=True) if lengths else values.new_zeros(0, 0)


@dataclass(frozen=True)
class TokenRows:
    """Prompts and responses, as a model scores them.

    Attributes:
        prompt_ids: Token ids of each row's prompt.
        response_ids: `[B, T]` int64, right-padded.
        lengths: `[B]` int64, response tokens of each row.
        experts: Those of a `Rollout`; None without.
    """

    prompt_ids: Ragged
    response_ids: Tensor
    lengths: Tensor
    experts: Ragged | None = None

    @classmethod
    def padded(cls, prompt_ids: Ragged, response_ids: Ragged) -> TokenRows:
        """The responses right-padded with zeros, which nothing reads: the rows carry their lengths."""
        lengths = on_host(response_ids.lengths).tolist()
        padded = _padded(response_ids.values, lengths)
        if is_on_host(response_ids.values):
            remember(padded, _padded(on_host(response_ids.values), lengths))
        return cls(prompt_ids, padded, response_ids.lengths)


@dataclass(frozen=True)
class Batch:
    """Rows of the dataset. Without a response column `T` is 0 and the mask is empty.

    Attributes:
        prompt_ids: Token ids of each prompt.
        response_ids: `[B, T]` int64, right-padded.
        loss_mask: `[B, T]` bool, True where a token is trained on.
        lengths: `[B]` int64, response tokens of each row, the end-of-sequence token included.
        rows: The dataset's rows.
    """

    prompt_ids: Ragged
    response_ids: PerToken
    loss_mask: PerToken
    lengths: PerSample
    rows: Rows

    @property
    def tokens(self) -> Tensor:
        """`[B]` int64, prompt and response tokens of each row."""
        return self.prompt_ids.lengths + self.lengths


@dataclass(frozen=True)
class Pairs:
    """Rows of the dataset that have two responses each, of which the chosen one was preferred.

    A response ends with the end-of-sequence token. A model that scores both reads the prompt twice.

    Attributes:
        prompt_ids: Token ids of each prompt.
        chosen_ids: Token ids of each chosen response.
        rejected_ids: Token ids of each rejected response.
        rows: The dataset's rows.
    """

    prompt_ids: Ragged
    chosen_ids: Ragged
    rejected_ids: Ragged
    rows: Rows

    @property
    def chosen(self) -> TokenRows:
        """`B` rows to score: each prompt with its chosen response."""
        return TokenRows.padded(self.prompt_ids, self.chosen_ids)

    @property
    def rejected(self) -> TokenRows:
        """`B` rows to score: each prompt with its rejected response."""
        return TokenRows.padded(self.prompt_ids, self.rejected_ids)

    @property
    def both(self) -> TokenRows:
        """`2 B` rows to score in one call: all `chosen`, then all `rejected`; `tensor_split(2)` parts what it gives."""
        return TokenRows.padded(
            self.prompt_ids.followed_by(self.prompt_ids), self.chosen_ids.followed_by(self.rejected_ids)
        )

    @property
    def tokens(self) -> Tensor:
        """`[B]` int64, what a model reads of each pair."""
        return 2 * self.prompt_ids.lengths + self.chosen_ids.lengths + self.rejected_ids.lengths


@dataclass(frozen=True)
class Rollout:
    """Sampled responses, `n` consecutive rows for each prompt.

    Attributes:
        prompt_ids: Token ids of each sample's prompt.
        response_ids: `[B, T]` int64, right-padded.
        loss_mask: `[B, T]` bool, True on generated tokens, the end-of-sequence token included.
        lengths: `[B]` int64, generated tokens of each row.
        logprobs: `[B, T]` float32, the engine's, of the policy version that generated each token, after temperature.
        finished: `[B]` bool, False where the response was cut at the longest allowed length.
        group: `[B]` int64, global id of the prompt that the sample answers.
        version: `[B]` int64, of the policy that generated the sample; of its oldest token where several did.
        versions: `[B, T]` int32, of the policy that generated each token.
        experts: The experts that the engine chose for each token that it read, `[sum, layers, k]` uint8 (int16 beyond
            256 experts): of a row its prompt and its response but for the last token, likeliest first. Without entries
            where no model replays them.
        texts: The decoded responses, special tokens left out.
        rows: The dataset's row of each sample.
    """

    prompt_ids: Ragged
    response_ids: PerToken
    loss_mask: PerToken
    lengths: PerSample
    logprobs: PerToken
    finished: PerSample
    group: PerSample
    version: PerSample
    versions: PerToken
    experts: Ragged
    texts: Annotated[list[str], Cut.JSON, Home]
    rows: Annotated[list[dict[str, Any]], Cut.JSON, Home]


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


@dataclass(frozen=True)
class Column:
    """One column of a value: the field's name ("" for a bare tensor), its cut, and whether it stays at home."""

    name: str
    cut: Cut
    home: bool = False


def columns(annotation: Any) -> tuple[Column, ...]:
    """The columns of a value of this annotated type; `None`, which is no value, has none.

    Raises:
        TypeError: The type is none of `PerSample`, `PerToken`, `Scalar`, `Rows`, `Texts`, `Ragged`,
            `dict[str, PerSample]`, nor a frozen dataclass of them.
    """
    if annotation is NoneType:
        return ()
    if dataclasses.is_dataclass(annotation) and annotation is not Ragged:
        hints = get_type_hints(annotation, include_extras=True)
        return tuple(_column(field.name, hints[field.name]) for field in dataclasses.fields(annotation))
    return (_column("", annotation),)


def _column(name: str, annotation: Any) -> Column:
    if annotation is Ragged:
        return Column(name, Cut.RAGGED)
    if annotation == dict[str, PerSample]:
        return Column(name, Cut.PARTS)
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    cuts = [mark for mark in marks if isinstance(mark, Cut)]
    if not cuts:
        place = f"field `{name}`" if name else "the value"
        legal = "PerSample, PerToken, Ragged, Rows, Texts or dict[str, PerSample]"
        raise TypeError(f"{place} is {annotation!r}; rows can be cut of {legal} only")
    return Column(name, cuts[0], Home in marks)


def countable(value: Any, annotation: Any) -> list[Tensor]:
    """The tensors of a value that are not floating point: of these the host counts, and cuts others by them."""
    found: list[Tensor] = []
    for column in columns(annotation):
        data = getattr(value, column.name) if column.name else value
        found += [data.values, data.lengths] if isinstance(data, Ragged) else [data] if isinstance(data, Tensor) else []
    return [tensor for tensor in found if not tensor.is_floating_point()]


def take_rows(value: Any, annotation: Any, index: Tensor) -> Any:
    """The rows of a value at `index` `[K]` int64, in that order; padding keeps its width."""
    return _columnwise([value], annotation, lambda data, cut: _take(data[0], cut, index))


def join_rows(values: Sequence[Any], annotation: Any) -> Any:
    """The rows of at least one value of this type, in order; `PerToken` columns get the width of the widest."""
    return _columnwise(values, annotation, _join)


def trim(value: Any, annotation: Any, longest: int) -> Any:
    """The value with its `PerToken` columns cut at the `longest` response; what is cut off is padding."""
    return _columnwise([value], annotation, lambda data, cut: data[0][:, :longest] if cut is Cut.TOKEN else data[0])


def _columnwise(values: Sequence[Any], annotation: Any, change: Callable[[list[Any], Cut], Any]) -> Any:
    """A value of this type, each of its columns made from those of `values`."""
    cuts = {column.name: column.cut for column in columns(annotation)}
    if "" in cuts:
        return change(list(values), cuts[""])
    changed = {name: change([getattr(value, name) for value in values], cut) for name, cut in cuts.items()}
    return dataclasses.replace(values[0], **changed)


def _take(column: Any, cut: Cut, index: Tensor) -> Any:
    if column is None or cut is Cut.SCALAR or isinstance(column, Absent):
        return column
    if cut is Cut.RAGGED:
        return column.take(index)
    if cut is Cut.JSON:
        return [column[i] for i in on_host(index).tolist()]
    if cut is Cut.PARTS:
        return Parts({name: rows_at(part, index) for name, part in column.items()})
    return rows_at(column, index)


def _join(parts: list[Any], cut: Cut) -> Any:
    assert cut is not Cut.SCALAR, "one number is not of rows"
    if any(part is None for part in parts):  # a field that did not come along from home
        return None
    if cut is Cut.JSON:
        return [entry for part in parts for entry in part]
    if cut is Cut.PARTS:
        return Parts({name: _join([part[name] for part in parts], Cut.SAMPLE) for name in parts[0]})
    filled = [part for part in parts if len(part)] or parts[:1]  # what has no row need not have a shape or dtype either
    if cut is Cut.RAGGED:
        return Ragged(joined([part.values for part in filled]), joined([part.lengths for part in filled]))
    if cut is Cut.TOKEN:
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
        return Parts({name: on_device(part, device) for name, part in value.items()})
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    moved = {field.name: to_device(getattr(value, field.name), device) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **moved)
