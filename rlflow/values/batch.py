"""Rows of the dataset, and the tokens of rows as a model scores them.

`B` is the number of rows on this rank, `T` the longest response among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.values.column_kinds import ColumnKind, OnDemand, PerSample, PerToken
from rlflow.values.columns import fill_in, optional
from rlflow.values.host_copy import computed
from rlflow.values.path import RowPath
from rlflow.values.protocols import Tokens, WithDatasetRows, computed_from
from rlflow.values.ragged import Ragged


@dataclass(frozen=True)
class TokenRows:
    """Prompts and responses, as a model scores them.

    Attributes:
        prompt_ids: Token ids of each row's prompt.
        response_ids: `[B, T]` int64, right-padded.
        lengths: `[B]` int64, response tokens of each row.
        columns: Other columns that a model reads, by name; see `rlflow.values.rollout.MODEL_INPUTS`.
    """

    prompt_ids: Ragged
    response_ids: Tensor
    lengths: Tensor
    columns: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def padded(cls, prompt_ids: Ragged, response_ids: Ragged, pictures: Any = None) -> TokenRows:
        """Rows whose responses are right-padded with zeros. Nothing reads the zeros, since rows have their lengths."""
        shown = {"pictures": pictures} if isinstance(pictures, Ragged) and len(pictures.values) else {}
        return cls(prompt_ids, response_ids.padded(), response_ids.lengths, shown)


class WithPaths:
    """Rows of a step (prompts or samples), each with a path that identifies it.

    Attributes:
        path: Path of each row; None where rows belong to no step.
    """

    path: RowPath | None

    @property
    @computed_from("path")
    def group(self) -> PerSample:
        """`[B]` int64, equal for rows with one parent: for samples of a prompt its id, and for a prompt its own id."""
        return self._path.group

    @property
    @computed_from("path")
    def index(self) -> PerSample:
        """`[B]` int64, the number of each row among its siblings; for a prompt, its id."""
        return self._path.index

    @property
    @computed_from("path")
    def episode(self) -> PerSample:
        """`[B]` int64, equal for the rows of a group that belong to one episode; here each row is one."""
        return self.index

    @property
    @computed_from("path")
    def first(self) -> PerSample:
        """`[B]` bool, whether a row is the first of its episode."""
        return self.episode == self.index

    @computed_from("path")
    def group_of(self, level: str) -> Tensor:
        """`[B]` int64, equal for rows below one row of `level`: `batch`, or the name of the node that made that row.

        Raises:
            UserError: There is no such level above these rows.
        """
        return self._path.group_of(level)

    @property
    def _path(self) -> RowPath:
        if self.path is None:
            raise UserError("these rows have no `path`, so it is not known which belong together; take a step's rows")
        return self.path


@dataclass(frozen=True)
class Batch(WithPaths):
    """Rows of the dataset. If there is no response column, `T` is 0 and the mask is empty.

    Two rows of SFT with a prompt and a response each; `T` is 3, the end token is 2, and `.` stands for padding:

        field          row 0                                  row 1
        prompt_ids     10 11                                  12 13 14
        response_ids   20 21 2                                22 2 .
        loss_mask      1 1 1                                  1 1 .
        lengths        3                                      2
        rows           {"question": "2+3=", "answer": "5"}    {"question": "4+4+1=", "answer": "9"}
        path           4                                      7

    Attributes:
        prompt_ids: Token ids of each prompt.
        response_ids: `[B, T]` int64, right-padded.
        loss_mask: `[B, T]` bool, True where a token is trained on.
        lengths: `[B]` int64, response tokens of each row, the end-of-sequence token included.
        rows: The dataset's rows.
        path: Path of each row, which is its id; None if the rows belong to no step.
        pictures: `[sum]` int64, numbers of the pictures of each prompt, by which a model finds them in the dataset; see
            `rlflow.data.pictures`. A prompt without pictures has no entries.
    """

    prompt_ids: Ragged
    response_ids: PerToken
    loss_mask: PerToken
    lengths: PerSample
    rows: Annotated[list[dict[str, Any]], ColumnKind.JSON, OnDemand]
    path: RowPath | None = None
    pictures: Annotated[Ragged, ColumnKind.RAGGED, OnDemand] = optional(torch.int64, model_input="any")

    def __post_init__(self) -> None:
        fill_in(self, "response_ids")

    @property
    def tokens(self) -> Tensor:
        """`[B]` int64, prompt and response tokens of each row."""
        return self.prompt_ids.lengths + self.lengths


class _Responses(Tokens, WithDatasetRows, Protocol):
    """The fields of samples from which a pair is made."""

    @property
    def path(self) -> RowPath | None: ...


@dataclass(frozen=True)
class Pairs(WithPaths):
    """Prompts with two responses each, a chosen and a rejected one. They come from a dataset, or are made from samples.

    Each response ends with the end-of-sequence token. To score both responses, a model reads the prompt twice. Two
    pairs:

        field          row 0            row 1
        prompt_ids     10 11            12 13 14
        chosen_ids     20 21 2          22 2
        rejected_ids   23 2             24 25 26 2
        rows           {"question": "2+3=", "chosen": "5", "rejected": "6"}, ...
        path           4                7

    Attributes:
        prompt_ids: Token ids of each prompt.
        chosen_ids: Token ids of each chosen response.
        rejected_ids: Token ids of each rejected response.
        rows: The dataset's rows.
        path: Path of each row, which is its id; None if the rows belong to no step.
        pictures: `[sum]` int64, numbers of the pictures of each prompt, see `Batch`.
    """

    prompt_ids: Ragged
    chosen_ids: Ragged
    rejected_ids: Ragged
    rows: Annotated[list[dict[str, Any]], ColumnKind.JSON, OnDemand]
    path: RowPath | None = None
    pictures: Annotated[Ragged, ColumnKind.RAGGED, OnDemand] = optional(torch.int64, model_input="any")

    def __post_init__(self) -> None:
        fill_in(self, "prompt_ids")

    @classmethod
    def of(cls, chosen: _Responses, rejected: _Responses) -> Pairs:
        """Pairs made row by row from preferred and rejected responses. The paths are those of `chosen`.

        Args:
            chosen: `B` samples.
            rejected: `B` rejected responses, to the same prompts in the same order.

        Raises:
            UserError: `chosen` and `rejected` have different numbers of rows.
        """
        if len(chosen.lengths) != len(rejected.lengths):
            raise UserError(
                f"`Pairs.of` got {len(chosen.lengths)} chosen and {len(rejected.lengths)} rejected responses; give one"
                " of each for a pair"
            )
        made = cls(chosen.prompt_ids, _unpadded(chosen), _unpadded(rejected), chosen.rows, chosen.path)
        pictures = getattr(chosen, "pictures", None)
        return replace(made, pictures=pictures) if isinstance(pictures, Ragged) else made

    @property
    def chosen(self) -> TokenRows:
        """`B` rows to score: each prompt with its chosen response."""
        return TokenRows.padded(self.prompt_ids, self.chosen_ids, self.pictures)

    @property
    def rejected(self) -> TokenRows:
        """`B` rows to score: each prompt with its rejected response."""
        return TokenRows.padded(self.prompt_ids, self.rejected_ids, self.pictures)

    @property
    def both(self) -> TokenRows:
        """`2 B` rows to score in one call: all `chosen`, then all `rejected`. Split the scores by `tensor_split(2)`."""
        pictures = self.pictures.followed_by(self.pictures) if isinstance(self.pictures, Ragged) else None
        return TokenRows.padded(
            self.prompt_ids.followed_by(self.prompt_ids), self.chosen_ids.followed_by(self.rejected_ids), pictures
        )

    @property
    def tokens(self) -> Tensor:
        """`[B]` int64, tokens that a model reads to score each pair."""
        return 2 * self.prompt_ids.lengths + self.chosen_ids.lengths + self.rejected_ids.lengths


def _unpadded(rows: _Responses) -> Ragged:
    """The responses without padding."""
    values = computed(
        lambda ids, lengths: ids[torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]],
        rows.response_ids,
        rows.lengths,
    )
    return Ragged(values, rows.lengths)
