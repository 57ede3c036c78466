"""Sampled responses.

`B` is the number of rows on this rank, `T` the longest response among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from rlflow.values.batch import Batch
from rlflow.values.columns import join_rows, take_rows
from rlflow.values.cuts import Cut, Home, PerSample, PerToken
from rlflow.values.host_copy import on_device
from rlflow.values.path import RowPath
from rlflow.values.protocols import computed_from
from rlflow.values.ragged import Ragged


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
        path: Who each sample is: the id of its prompt, then its number among the prompt's samples.
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
    path: RowPath
    version: PerSample
    versions: PerToken
    experts: Ragged
    texts: Annotated[list[str], Cut.JSON, Home]
    rows: Annotated[list[dict[str, Any]], Cut.JSON, Home]

    @property
    @computed_from("path")
    def group(self) -> PerSample:
        """`[B]` int64, alike where samples have one parent; the id of the prompt where that is one."""
        return self.path.group

    @property
    @computed_from("path")
    def index(self) -> PerSample:
        """`[B]` int64, the number of each sample among those of its parent."""
        return self.path.index

    @computed_from("path")
    def group_of(self, level: str) -> Tensor:
        """`[B]` int64, alike where samples descend from one row of `level`: `batch`, or the node that made the rows.

        Raises:
            UserError: There is no such level above these samples.
        """
        return self.path.group_of(level)

    def take(self, rows: Tensor) -> Rollout:
        """The rows at `rows` `[K]` int64, in that order."""
        taken: Rollout = take_rows(self, type(self), rows)
        return taken

    def concat(self, *others: Rollout) -> Rollout:
        """These rows, then those of the others; as wide as the widest."""
        joined: Rollout = join_rows([self, *others], type(self))
        return joined

    def as_prompts(self, render: Callable[[str, dict[str, Any]], Sequence[int]]) -> Batch:
        """Prompts made of the responses, one of each row; what answers them are children of these rows.

        Args:
            render: Given a response's text and its row of the dataset, the token ids of the prompt; see
                `RLModule.tokens`.

        Raises:
            UserError: The texts did not come along, since the node does not ask for them.
        """
        device = self.response_ids.device
        written = Ragged.from_lists([render(text, row) for text, row in zip(self.texts, self.rows, strict=True)])
        prompts = Ragged(on_device(written.values, device), on_device(written.lengths, device))
        none = self.response_ids[:, :0]
        return Batch(prompts, none, none.bool(), torch.zeros_like(self.lengths), self.rows, self.path)
