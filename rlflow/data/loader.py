"""The distributed loader: each rank reads its own rows of the global batches that all ranks agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlflow.data.mixture import Mixture, interleaved
from rlflow.data.pictures import number_of
from rlflow.data.prompts import Encoder, Example, PromptData
from rlflow.data.scan import (
    Scan,
    TokenizedRows,
    checked,
    count,
    count_together,
    keep_counted,
    key_of,
    read_counted,
    scan,
)
from rlflow.data.sources import Source
from rlflow.databuffer.transport import Transport
from rlflow.environments.environment import Environment
from rlflow.errors import UserError, about
from rlflow.models.picture_processor import PictureProcessor
from rlflow.rewards.gold import check_gold
from rlflow.rewards.reward import Reward
from rlflow.values.batch import Batch, Pairs
from rlflow.values.path import hashed
from rlflow.values.picture import Picture
from rlflow.values.ragged import Ragged
from rlflow.values.response_settings import ResponseSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Choose = Callable[[int, Tensor], Tensor]
FIRST_ROWS = 8
GOLD_ROWS = 8  # whose own answers are scored before the first step
FEW_ROWS = 2048  # that every rank counts immediately and keeps in memory, and nobody stores on disk
REMEMBERED = 1000  # draws whose rows are known: responses that are cut off, and groups left over, are of earlier ones


class Loader:
    """Loads global batches, a function of seed, epoch and the module's choice, in shards of consecutive rows.

    Draw `k` takes `prompts_per_step` rows; which ones does not depend on the number of shards, nor on the draws before
    unless the module chooses, see `choose_by`. So a run continues anywhere. A step is one draw, or as many as it takes
    to fill it. With 10 rows and 4 prompts a step an epoch has 2 draws, and shard 1 of 2 of draw 3 has ids 14 and 15.

    All rows are scanned once, before any is dealt out: at construction where there are few or a previous run has stored
    their tokens, else by `scan_together`; after that a rank reads its own rows, which are not tokenised again.

    Args:
        source: The rows.
        data: Settings of the data, with columns resolved.
        tokenizer: Tokenizer of the model.
        seed: Seed of the order.
        limit: Number of rows to draw from: the first rows that are not dropped, of each dataset in a mixture.
        ranks: Number of ranks that will scan together; 1 scans at construction.
        environment: Environment with which conversations of the dataset were held; None if there is none.
        reward: Reward that scores responses to these rows, if one does; it must be able to score all of them.
        processor: Processor of a model that reads pictures; None for one that reads text alone.
        validates: Whether these are the rows of validation, for the numbers of pictures.

    Raises:
        UserError: The dataset is empty, a row cannot be read or scored, or it is too long and `data.overlong_rows` is
            `error`.

    Attributes:
        encode: Rows and texts to tokens.
        chosen: The rows that the module chooses; None where it does not choose.
    """

    def __init__(
        self,
        source: Source,
        data: PromptData,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        limit: int | None = None,
        ranks: int = 1,
        environment: Environment | None = None,
        reward: Reward | None = None,
        processor: PictureProcessor | None = None,
        validates: bool = False,
    ) -> None:
        self._source = source
        self._data = data
        self._validates = validates
        self.encode = Encoder(data, tokenizer, environment, processor)
        self._pictured = None if processor is None else self.encode
        self._pad = tokenizer.pad_token_id or 0  # never read: a batch carries its lengths
        self._seed = seed
        self._limit = limit
        self._reward = reward
        self._order = lru_cache(maxsize=2)(self._shuffled)
        self.chosen: ChosenRows | None = None
        self._scan: Scan | None = None
        self._counted: TokenizedRows | None = None
        with about(source):
            rows = len(source)
        self._key = key_of(source, data, tokenizer, environment, reward, processor) if rows > FEW_ROWS else None
        is_known = reward is None or reward.checked_by is not None
        counted = read_counted(self._key, rows) if self._key is not None and is_known else None
        if counted is None and (ranks == 1 or self._key is None):
            counted = self._count()
        if counted is not None:
            self._use(counted)
        else:  # what is lacking in all rows is known before ranks begin
            for row in range(min(rows, FIRST_ROWS) if environment is not None or reward is not None else 0):
                checked(source[row], self.encode, reward, source.where(row))

    @property
    def is_scanned(self) -> bool:
        """Whether the rows have been scanned."""
        return self._scan is not None

    @property
    def scan(self) -> Scan:
        """The result of the scan; printed, it says what was dropped."""
        assert self._scan is not None, "the ranks have not scanned yet"
        return self._scan

    @property
    def _kept(self) -> Tensor:
        if self._limit is None or not isinstance(self._source, Mixture):
            return self.scan.kept[: self._limit]
        return interleaved(self._by_dataset(self.scan.kept))[: self._limit].sort().values

    def _use(self, counted: TokenizedRows) -> None:
        with about(self._source):
            self._scan = scan(self._source, self._data, counted.numbers)
        self._counted = counted

    def _count(self, keeps: bool = True) -> TokenizedRows:
        """Count all rows, on this rank alone."""
        rows = len(self._source)
        counted = count(self._source, self.encode, range(rows), self._reward)
        if self._key is None or not keeps:
            return counted
        assert counted.ids is not None
        keep_counted(self._key, counted.numbers, [(0, counted.ids)])
        return read_counted(self._key, rows) or counted

    @property
    def offered(self) -> Tensor:
        """The rows to draw from `[size]` int64, places in the dataset."""
        return self._kept

    @property
    def size(self) -> int:
        """Number of rows to draw from, up to the limit."""
        return len(self._kept)

    @property
    def steps_per_epoch(self) -> int:
        """Full draws in one pass over the rows: the steps of an epoch where each is one draw.

        Raises:
            UserError: There are fewer rows than one draw takes.
        """
        self.require_enough()
        return self.size // self._data.prompts_per_step

    def require_enough(self) -> None:
        """Refuse a dataset that has not enough rows for a step.

        Raises:
            UserError: There are fewer rows than one draw takes.
        """
        if self.size < self._data.prompts_per_step:
            raise UserError(
                f"{self._source.name} has {self.size} rows, fewer than `data.prompts_per_step`"
                f" {self._data.prompts_per_step}; lower it to at most {self.size}"
            )

    def batch(self, draw: int, shard: int, shards: int) -> tuple[Batch | Pairs, Tensor]:
        """This shard's rows of draw `draw`, counted from the start of the run, and their ids.

        Returns:
            The rows, `Pairs` where `data.rejected` is set, and ids `[B]` int64: the row's place among all that the run
            draws.
        """
        drawn = self._data.prompts_per_step
        mine = share(drawn, shard, shards)
        rows = self._rows(draw)[mine.start : mine.stop]
        return self._read(rows), torch.arange(mine.start, mine.stop) + draw * drawn

    def choose_by(self, choose: Choose) -> None:
        """Let `choose(epoch, rows)` choose the rows of each epoch; it gets them in the order of the seed."""
        self.chosen = ChosenRows(choose, self._shuffled, self._data.prompts_per_step)

    def rows_of(self, ids: Tensor) -> Tensor:
        """Places in the dataset `[N]` int64 of prompts, by the ids `[N]` that `batch` gave."""
        draws, places = ids // self._data.prompts_per_step, ids % self._data.prompts_per_step
        rows = torch.zeros_like(ids)
        for draw in draws.unique().tolist():
            rows[draws == draw] = self._rows(draw)[places[draws == draw]]
        return rows

    def first(self) -> Batch | Pairs:
        """One row, the first that the seed draws."""
        return self._read(self._order(0)[:1])

    def masks(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """For each dataset of a mixture by name, which rows belong to it: `[N]` bool; empty for one dataset."""
        return self._source.masks(rows) if isinstance(self._source, Mixture) else {}

    def own_settings(self, rows: Sequence[Mapping[str, Any]]) -> list[ResponseSettings]:
        """The response settings from the dataset of each of these rows, in a mixture; else an empty list."""
        return self._source.own_settings(rows) if isinstance(self._source, Mixture) else []

    def check_gold(self) -> None:
        """Score the gold answers of some rows of each dataset, spread over it; see `rlflow.rewards.gold.check_gold`."""
        for kept in [] if self._reward is None else self._by_dataset(self._kept):
            assert self._reward is not None
            rows = kept[spread(len(kept), GOLD_ROWS)].tolist()
            read = [self.encode.sent(row) for row in self._source.read(rows)]
            places = [self._source.where(row) for row in rows]
            check_gold(self._reward, read, places, self._data.prompt, self.encode.tokens)

    def _rows(self, draw: int) -> Tensor:
        """`[prompts_per_step]`: the rows of a draw, over all ranks."""
        if self.chosen is not None:
            return self.chosen.rows(draw)
        epoch, draw_of_epoch = divmod(draw, self.steps_per_epoch)
        first = draw_of_epoch * self._data.prompts_per_step
        return self._order(epoch)[first : first + self._data.prompts_per_step]

    def all(self, shard: int, shards: int) -> tuple[Batch | Pairs, Tensor]:
        """This shard of all rows to draw from, in the source's order, and their ids `[B]` int64, as for validation."""
        mine = share(self.size, shard, shards)
        return self._read(self._kept[mine.start : mine.stop]), torch.arange(mine.start, mine.stop)

    def rows_at(self, ids: Tensor) -> Batch | Pairs:
        """The rows of these ids `[B]`, which are those of `all`."""
        return self._read(self._kept[ids])

    def rows_of_all(self, ids: Tensor) -> Tensor:
        """Places in the dataset `[N]` int64, by the ids `[N]` that `all` gave."""
        return self._kept[ids]

    def _shuffled(self, epoch: int) -> Tensor:
        """The rows to draw from `[size]` in the order of this epoch."""
        if isinstance(self._source, Mixture):
            return self._source.drawn(self._kept, epoch, self._permuted, self._data.prompts_per_step)
        return self._permuted(self._kept, epoch)

    def _permuted(self, rows: Tensor, number: int, of: str = "") -> Tensor:
        """Rows `[N]` in the order of a pass over them, of the dataset of a name where there are several."""
        if not self._data.shuffle:
            return rows
        generator = torch.Generator().manual_seed(hashed(f"{self._seed}/{number}/order{of and f'/{of}'}", size=7))
        return rows[torch.randperm(len(rows), generator=generator)]

    def _by_dataset(self, rows: Tensor) -> list[Tensor]:
        """Rows `[N]`, ascending, by dataset."""
        return self._source.split(rows) if isinstance(self._source, Mixture) else [rows]

    def pictures(self, row: int) -> list[Picture]:
        """The pictures of a row of the dataset.

        Raises:
            UserError: A picture is not where it was when the rows were scanned.
        """
        source = self._source
        return self.encode.pictures(source.read([row])[0], source.folder(row), source.where(row))

    def _read(self, rows: Tensor) -> Batch | Pairs:
        if self._counted is None or self._counted.ids is None:
            examples = self.encode(self._source, rows.tolist())
        else:
            examples = self._counted.examples(self._source, rows.tolist(), self._pictured)
        batch = collate(examples, self._pad) if self._data.rejected is None else collate_pairs(examples)
        numbers = [
            [number_of(row, place, self._validates) for place in range(example.pictures or 0)]
            for row, example in zip(rows.tolist(), examples, strict=True)
        ]
        return replace(batch, pictures=Ragged.from_lists(numbers)) if any(numbers) else batch


@dataclass(frozen=True)
class Epoch:
    """The rows of one epoch.

    Attributes:
        number: Number of the epoch, from 0.
        first_draw: First draw of the epoch, as the run counts draws.
        rows: `[N]` int64, places in the dataset, in the order in which they are drawn.
    """

    number: int
    first_draw: int
    rows: Tensor

    @property
    def digest(self) -> bytes:
        """Digest of the rows, by which ranks compare what they chose."""
        return hashlib.sha256(self.rows.numpy().tobytes()).digest()


class ChosenRows:
    """The rows of each draw, where the module chooses those of an epoch when its first draw begins.

    Args:
        choose: The module's `choose_prompts`.
        shuffled: The rows of an epoch in the order of the seed.
        per_draw: Rows of one draw. An epoch leaves out the rows that fill none.
    """

    def __init__(self, choose: Choose, shuffled: Callable[[int], Tensor], per_draw: int) -> None:
        self._choose, self._shuffled, self._per_draw = choose, shuffled, per_draw
        self._epochs: list[Epoch] = []

    def begin(self, draw: int) -> Epoch | None:
        """Choose the rows of the epoch that this draw begins, and return it; None within an epoch.

        Draws are begun one after another: what the module knows then decides.

        Raises:
            UserError: The module chose fewer rows than a draw takes, or some that it was not offered.
        """
        if self.knows(draw):
            return None
        number, first = (self._epochs[-1].number + 1, self._end(self._epochs[-1])) if self._epochs else (0, 0)
        assert draw == first, f"draw {draw} begins no epoch; the next one begins with draw {first}"
        offered = self._shuffled(number)
        rows = self._choose(number, offered.clone())
        if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype != torch.int64:
            raise UserError(f"`choose_prompts` returned {rows!r:.60}; return rows that it was given, `[N]` int64")
        if not bool(torch.isin(rows, offered).all()):
            stray = int(rows[~torch.isin(rows, offered)][0])
            raise UserError(
                f"`choose_prompts` returned row {stray}, which it was not given; return rows that it was given"
            )
        if len(rows) < self._per_draw:
            raise UserError(
                f"`choose_prompts` left {len(rows)} of {len(offered)} prompts for epoch {number + 1}, and a step takes"
                f" {self._per_draw} (`data.prompts_per_step`); let it leave more, or end the run before"
            )
        self._epochs = [epoch for epoch in self._epochs if self._end(epoch) > draw - REMEMBERED]
        self._epochs.append(Epoch(number, draw, rows.cpu()))
        return self._epochs[-1]

    def knows(self, draw: int) -> bool:
        """Whether the rows of the draw have been chosen."""
        return any(epoch.first_draw <= draw < self._end(epoch) for epoch in self._epochs)

    def rows(self, draw: int) -> Tensor:
        """`[per_draw]`: the rows of a draw whose rows have been chosen."""
        for epoch in self._epochs:
            if epoch.first_draw <= draw < self._end(epoch):
                start = (draw - epoch.first_draw) * self._per_draw
                return epoch.rows[start : start + self._per_draw]
        raise UserError(
            f"a node asks for the dataset's rows of draw {draw + 1}, which this rank has not loaded; ask in a node"
            " without a role that reads what a rollout node made"
        )

    def state_dict(self) -> dict[str, Any]:
        """The rows of the epochs that are known, JSON-able, and the number of rows in a draw."""
        epochs = [{**vars(epoch), "rows": epoch.rows.tolist()} for epoch in self._epochs]
        return {"per_draw": self._per_draw, "epochs": epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._epochs = [
            Epoch(**{**each, "rows": torch.tensor(each["rows"], dtype=torch.int64)}) for each in state["epochs"]
        ]

    def _end(self, epoch: Epoch) -> int:
        """The draw after the epoch's last."""
        return epoch.first_draw + len(epoch.rows) // self._per_draw


_Draw = tuple[int, int, int]  # draw, shard, shards


class Prefetch:
    """A loader that reads one draw ahead. Its batches are those of the loader, whatever the timing.

    One thread does all reading, so a source never has to read two rows at the same time. It starts at the first draw:
    a rank that loads nothing has none. No draw of an epoch is read before a module has chosen its rows.

        with Prefetch(loader, draws=100) as prompts:
            batch, ids = prompts.batch(0, shard=0, shards=2)

    Args:
        loader: Loader that is read.
        draws: Number of the run's draws, past which nothing is read; None where nobody knows, and at most one is read
            in vain.
    """

    def __init__(self, loader: Loader, draws: int | None) -> None:
        self._loader = loader
        self._draws = draws
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rlflow-prefetch")
        self._next: tuple[_Draw, Future[tuple[Batch | Pairs, Tensor]]] | None = None

    def batch(self, draw: int, shard: int, shards: int) -> tuple[Batch | Pairs, Tensor]:
        """The batch that `Loader.batch` returns; afterwards the next draw is begun.

        Raises:
            UserError: The same as from `Loader.batch`, for this draw; faults of the next one are raised with that draw.
        """
        expected, coming = self._next or (None, None)
        self._next = None
        if coming is None or expected != (draw, shard, shards):
            coming = self._reader.submit(self._loader.batch, draw, shard, shards)
        read = coming.result()
        chosen = self._loader.chosen
        if (self._draws is None or draw + 1 < self._draws) and (chosen is None or chosen.knows(draw + 1)):
            following = (draw + 1, shard, shards)
            self._next = following, self._reader.submit(self._loader.batch, *following)
        return read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.shutdown(cancel_futures=True)


def scan_together(loaders: Sequence[Loader | None], transport: Transport, keeps: bool) -> None:
    """Scan the datasets that some rank has not scanned; a collective of all ranks.

    Each counts a share of the rows, where all see the same data, tokenizer and template; else each counts its own, and
    what differs is reported afterwards.

    Args:
        loaders: Loaders, as many on every rank; None where there is none.
        transport: Transport to the other ranks.
        keeps: Whether this rank stores rows for the others and for later runs; one does of each machine.

    Raises:
        UserError: The same as from the constructor, on all ranks alike.
    """
    states = [(True, None) if loader is None else (loader.is_scanned, loader._key) for loader in loaders]
    of_ranks = transport.gather_json(states)
    for loader, *of_loader in zip(loaders, *of_ranks, strict=True):
        if loader is None or all(is_scanned for is_scanned, _ in of_loader):
            continue
        if loader._key is not None and all(key == loader._key for _, key in of_loader):
            source, mine = loader._source, share(len(loader._source), transport.rank, transport.world_size)
            counted = count_together(source, loader.encode, mine, transport, loader._key, keeps, loader._reward)
            loader._use(counted)
        elif not loader.is_scanned:
            loader._use(loader._count(keeps))


def share(count: int, shard: int, shards: int) -> range:
    """The consecutive part of `count` things that falls to `shard`; parts differ by at most one."""
    return range(count * shard // shards, count * (shard + 1) // shards)


def spread(count: int, most: int) -> Tensor:
    """At most this many places among `count`: the first, the last, and places between at even distances; int64."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64).long()  # float32 ends at 2**24


def collate(examples: Sequence[Example], pad: int) -> Batch:
    """The examples as one batch, in their order; every token that the policy wrote is trained on."""
    responses = [torch.tensor(example.response_ids, dtype=torch.int64) for example in examples]
    lengths = torch.tensor([len(response) for response in responses], dtype=torch.int64)
    padded = pad_sequence(responses, batch_first=True, padding_value=pad) if responses else lengths.new_zeros(0, 0)
    mask = torch.arange(padded.shape[1]) < lengths[:, None]  # [B, T]
    for row, example in enumerate(examples):
        if example.written is not None:
            mask[row, : len(example.written)] &= torch.tensor(example.written)
    return Batch(
        prompt_ids=Ragged.from_lists([example.prompt_ids for example in examples]),
        response_ids=padded,  # [B, T]
        loss_mask=mask,
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
