"""The distributed loader: each rank reads its own rows of the global batches that all ranks agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlflow.data.batch import Batch, Pairs, Ragged
from rlflow.data.prompts import Encoder, Example, PromptData
from rlflow.data.scan import scan
from rlflow.data.sources import Source
from rlflow.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Loader:
    """Global batches as a function of (seed, epoch) alone, dealt out in shards of consecutive rows.

    Draw `k` takes `prompts_per_step` rows; which ones depends neither on the number of shards nor on the draws before,
    so a run continues anywhere. A step is one draw, or as many as it takes to fill it. All rows are scanned once at
    construction, before any is dealt out; after that a rank reads its own.

    Args:
        source: The rows.
        data: How they are read.
        tokenizer: Of the model.
        seed: Of the order.
        limit: Only the first so many rows that are kept.

    Raises:
        UserError: The dataset is empty, a row cannot be read, or a row is too long and `data.overlong` is `error`.

    Attributes:
        scan: What the scan found; printed, it says what was dropped.
    """

    def __init__(
        self,
        source: Source,
        data: PromptData,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        limit: int | None = None,
    ) -> None:
        self._source = source
        self._data = data
        self._encode = Encoder(data, tokenizer)
        self._pad = tokenizer.pad_token_id or 0  # never read: a batch carries its lengths
        self._seed = seed
        self.scan = scan(source, data, self._encode)
        self._kept = self.scan.kept[:limit]
        self._order = lru_cache(maxsize=1)(self._shuffled)

    @property
    def size(self) -> int:
        """Rows that are kept, up to the limit."""
        return len(self._kept)

    @property
    def prompts_per_step(self) -> int:
        """Rows of one draw, and groups of a step."""
        return self._data.prompts_per_step

    @property
    def steps_per_epoch(self) -> int:
        """Full draws in one pass over the rows: the steps of an epoch where each is one draw.

        Raises:
            UserError: There are fewer rows than one draw takes.
        """
        if self.size < self._data.prompts_per_step:
            raise UserError(
                f"{self._source.name} has {self.size} rows, fewer than `data.prompts_per_step`"
                f" {self._data.prompts_per_step}; lower it to at most {self.size}"
            )
        return self.size // self._data.prompts_per_step

    def batch(self, draw: int, shard: int, shards: int) -> tuple[Batch | Pairs, Tensor]:
        """This shard's rows of draw `draw`, counted from the start of the run, and their ids.

        Returns:
            The rows, `Pairs` where `data.rejected` is set, and ids `[B]` int64: the row's place among all that the run
            draws.
        """
        epoch, draw_of_epoch = divmod(draw, self.steps_per_epoch)
        drawn = self._data.prompts_per_step
        mine = share(drawn, shard, shards)
        first = draw_of_epoch * drawn
        rows = self._order(epoch)[first + mine.start : first + mine.stop]
        return self._read(rows), torch.arange(mine.start, mine.stop) + draw * drawn

    def all(self, shard: int, shards: int) -> tuple[Batch | Pairs, Tensor]:
        """This shard of all kept rows in the order of the source, and their ids `[B]` int64, as for validation."""
        mine = share(self.size, shard, shards)
        return self._read(self._kept[mine.start : mine.stop]), torch.arange(mine.start, mine.stop)

    def _shuffled(self, epoch: int) -> Tensor:
        """The kept rows `[size]` in the order of this epoch."""
        if not self._data.shuffle:
            return self._kept
        key = hashlib.blake2b(f"{self._seed}/{epoch}/order".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
        return self._kept[torch.randperm(self.size, generator=generator)]

    def _read(self, rows: Tensor) -> Batch | Pairs:
        examples = self._encode(self._source, rows.tolist())
        return collate(examples, self._pad) if self._data.rejected is None else collate_pairs(examples)


def share(count: int, shard: int, shards: int) -> range:
    """The consecutive part of `count` things that falls to `shard`; parts differ by at most one."""
    return range(count * shard // shards, count * (shard + 1) // shards)


def collate(examples: Sequence[Example], pad: int) -> Batch:
    """The examples as one batch, in their order; every token of a response is trained on."""
    responses = [torch.tensor(example.response_ids, dtype=torch.int64) for example in examples]
    lengths = torch.tensor([len(response) for response in responses], dtype=torch.int64)
    padded = pad_sequence(responses, batch_first=True, padding_value=pad) if responses else lengths.new_zeros(0, 0)
    return Batch(
        prompt_ids=Ragged.from_lists([example.prompt_ids for example in examples]),
        response_ids=padded,  # [B, T]
        loss_mask=torch.arange(padded.shape[1]) < lengths[:, None],
        lengths=lengths,
        rows=[example.row for example in examples],
    )


def collate_pairs(examples: Sequence[Example]) -> Pairs:
    """The examples as pairs, in their order."""
    return Pairs(
        prompt_ids=Ragged.from_lists([example.prompt_ids for example in examples]),
        chosen_ids=Ragged.from_lists([example.response_ids for example in examples]),
        rejected_ids=Ragged.from_lists([example.rejected_ids for example in examples]),
        rows=[example.row for example in examples],
    )
