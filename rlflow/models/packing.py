"""Rows of prompts and responses as the model reads them: packed without padding, split by a token budget.

The logits at one token score the next one. So the last token of a row is not fed to the model: there is no next token
to score. A row without a response is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlflow.databuffer.balance import even_parts
from rlflow.errors import UserError
from rlflow.models.picture_processor import PictureReader, PicturesRead
from rlflow.models.prefixes import Prefixes, families, gather, neighbours
from rlflow.values.batch import Pairs, TokenRows
from rlflow.values.column_kinds import ColumnKind, PerToken
from rlflow.values.columns import to_device
from rlflow.values.host_copy import bring_over, on_host, rows_at
from rlflow.values.protocols import Tokens
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import MODEL_INPUTS
from rlflow.values.truncation import END, SUPPORT, by_token

PICTURES = "pictures"  # the column of numbers of pictures


def take(rows: Tokens, index: Tensor) -> TokenRows:
    """The rows at `index` `[b]` int64, in that order."""
    taken = {
        name: data.take(index) if isinstance(data, Ragged) else rows_at(data, index)
        for name, data in columns_of(rows).items()
    }
    rows_there = rows.prompt_ids.take(index), rows_at(rows.response_ids, index), rows_at(rows.lengths, index)
    return TokenRows(*rows_there, taken)


def tokens_alone(rows: Tokens) -> TokenRows:
    """The rows with their pictures, and without other columns."""
    shown = {name: data for name, data in columns_of(rows).items() if name == PICTURES}
    return TokenRows(rows.prompt_ids, rows.response_ids, rows.lengths, shown)


def columns_of(rows: Tokens) -> Mapping[str, Tensor | Ragged]:
    """The columns that a model reads in addition to the tokens of these rows, by name, if they were made and sent."""
    if isinstance(rows, TokenRows):
        return rows.columns
    found = {name: getattr(rows, name, None) for name in MODEL_INPUTS}
    return {
        name: data
        for name, data in found.items()
        if isinstance(data, Tensor) or (isinstance(data, Ragged) and len(data.values))
    }


@dataclass(frozen=True)
class ModelInput:
    """The input of one forward pass, and where its results belong. `R` is the number of response tokens in it.

    A prompt 5 6 with the response 7 8, and a prompt 9 with the response 10, are packed as

        input_ids     [[5, 6, 7, 9]]       without 8 and 10, after which no token is scored
        position_ids  [[0, 1, 2, 0]]
        cu_seqlens    [0, 3, 4]
        scored        [1, 2, 3]            positions of 6, 7 and 9
        targets       [7, 8, 10]
        mask          [[1, 1], [1, 0]]

    Attributes:
        input_ids: `[1, N]`, all sequences in one line; or `[S, L]`, one sequence a line, right-padded.
        position_ids: Shaped like `input_ids`; starts at 0 in each sequence. If positions have three dimensions, see
            `PictureProcessor.positions`, `[3, 1, N]` or `[3, S, L]`.
        cu_seqlens: `[S + 1]` int32, where each sequence of the line starts, and the end; None where padded. A row that
            shares a prefix with the row before has only its other tokens in the line.
        max_seqlen: Length of the longest sequence.
        scored: `[R]` int64, flat positions in `input_ids` where the logits score a response token.
        targets: `[R]` int64, those response tokens, row by row.
        mask: `[B, T]` bool, where those tokens stand in the responses.
        useful_tokens: Tokens in `input_ids` without padding and dummy tokens.
        columns: Other columns that the model reads, by name: `[N, ...]` with an entry for each token of the line,
            `[R, ...]` with one for each response token, or all entries of the rows. `pictures` is `[N]`, a number for
            each token, equal in rows with the same pictures. Empty where the line is divided.
        head_inputs: `[R, ...]` each, further arguments of the output layer with an entry for each scored token, such as
            tokens to score there.
        prefixes: The tokens of the line that each row sees, if rows share tokens; else None.
        pictures: The pictures of the rows, for a model that reads pictures; else None.
        order: `[R]` int64, in a part of a divided line: for each scored token, row by row, the place of its value among
            the values of all parts one after another. None where they are in that order.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int
    scored: Tensor
    targets: Tensor
    mask: Tensor
    useful_tokens: int
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    head_inputs: tuple[Tensor, ...] = ()
    prefixes: Prefixes | None = None
    pictures: PicturesRead | None = None
    order: Tensor | None = None

    def to(self, device: torch.device) -> ModelInput:
        """The same input on another device."""
        moved: ModelInput = to_device(self, device)
        return moved

    def arguments(self) -> tuple[Tensor, Tensor, Tensor | None, int, Tensor, Tensor]:
        """The first arguments of `PackedModel.forward`, before those of the output layer."""
        return self.input_ids, self.position_ids, self.cu_seqlens, self.max_seqlen, self.scored, self.targets

    def by_sequence(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """`[N, ...]` values of the line as `[K, ...]`, all tokens of each row; and the rows' lengths, `[S]` int64."""
        assert self.cu_seqlens is not None, "only a packed line is of sequences one after another"
        if self.prefixes is None:
            return values, self.cu_seqlens.diff().long()
        return gather(values, 0, self.prefixes.keys), self.prefixes.lengths()

    def divide(self, size: int) -> list[ModelInput]:
        """The line in `size` parts of one length, in order; padding at its end is a sequence of its own.

        A part has its own tokens and scored positions. It has `cu_seqlens`, `mask` and what else `unpack` needs of the
        whole line.
        """
        if size == 1:
            return [self]
        assert self.cu_seqlens is not None, "only a packed line is divided"
        assert not self.columns, "what is read with the tokens is not divided"
        total = self.input_ids.numel()
        length = -(-total // size)
        padding = torch.arange(length * size - total)
        input_ids = torch.cat([self.input_ids[0], torch.zeros_like(padding)]).split(length)
        position_ids = torch.cat([self.position_ids[0], padding]).split(length)
        ends = (
            self.cu_seqlens if len(padding) == 0 else torch.cat([self.cu_seqlens, self.cu_seqlens[-1:] + len(padding)])
        )
        inside = [(self.scored // length == part).nonzero().flatten() for part in range(size)]
        return [
            ModelInput(
                input_ids=input_ids[part][None],
                position_ids=position_ids[part][None],
                cu_seqlens=ends,
                max_seqlen=max(self.max_seqlen, len(padding)),
                scored=self.scored[inside[part]] - part * length,
                targets=self.targets[inside[part]],
                mask=self.mask,
                useful_tokens=min(max(self.useful_tokens - part * length, 0), length),
                head_inputs=tuple(rows_at(each, inside[part]) for each in self.head_inputs),
                prefixes=None if self.prefixes is None else self.prefixes.padded(total, len(padding)),
                order=None if self.prefixes is None else torch.cat(inside).argsort(),
            )
            for part in range(size)
        ]

    def in_order(self, of_parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The values of the scored tokens of all parts, `[R, ...]` each, put in the order of the rows."""
        return of_parts if self.order is None else tuple(values[self.order] for values in of_parts)

    def unpack(self, values: Tensor) -> PerToken:
        """`[R, ...]` values as `[B, T, ...]`, 0 where padded; differentiable, even without a row."""
        mask = self.mask.view(*self.mask.shape, *[1] * (values.dim() - 1))
        return values.new_zeros(*self.mask.shape, *values.shape[1:]).masked_scatter(mask, values)


def _as_they_are(values: tuple[Tensor, ...], counts: list[int]) -> tuple[Tensor, ...]:
    return values


@dataclass(frozen=True)
class Peers:
    """The ranks that divide each line of a model among them, so that each holds the activations of its part.

    Attributes:
        size: Number of ranks.
        rank: Place of this rank among them.
        gather: Function from this rank's values, `[r, ...]` each, to those of the whole line, `[R, ...]`, on all peers.
            Its second argument has the lengths of all peers' values. Each peer gets the gradient of its own values.
    """

    size: int = 1
    rank: int = 0
    gather: Callable[[tuple[Tensor, ...], list[int]], tuple[Tensor, ...]] = _as_they_are


ALONE = Peers()


def on_cpu(rows: Tokens) -> TokenRows:
    """The same rows on the CPU, where counting and packing is cheap; copied from a device once, in one transfer."""
    prompts = rows.prompt_ids
    bring_over([prompts.values, prompts.lengths, rows.response_ids, rows.lengths])
    here = prompts.on_host()
    return TokenRows(here, on_host(rows.response_ids), on_host(rows.lengths))


def no_rows() -> TokenRows:
    """A value of no rows."""
    return TokenRows(Ragged.from_lists([]), torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))


def whole(rows: Tokens) -> TokenRows:
    """Each row as a prompt, followed by one dummy token, so that the model scores once, at the row's last token."""
    here = on_cpu(rows)
    pieces = [here.prompt_ids.values[:0]]
    for prompt, response, length in zip(here.prompt_ids.rows(), here.response_ids, here.lengths.tolist(), strict=True):
        pieces += [prompt, response[:length]]
    prompts = Ragged(torch.cat(pieces), here.prompt_ids.lengths + here.lengths)
    shown = tokens_alone(rows).columns
    found = TokenRows(prompts, torch.zeros_like(here.lengths)[:, None], torch.ones_like(here.lengths), shown)
    there: TokenRows = to_device(found, rows.lengths.device)
    return there


def response_mask(rows: Tokens) -> Tensor:
    """`[B, T]` bool on the CPU, True where a response token stands."""
    return torch.arange(rows.response_ids.shape[1]) < on_host(rows.lengths)[:, None]


def supports(rows: Tokens) -> Tensor | None:
    """`[R, K]` int64 on the CPU: the tokens from which each response token was sampled, itself among them.

    The token itself fills the remaining places. The first entry is -1 for a token that was sampled from the whole
    vocabulary. None if all tokens were.
    """
    column = columns_of(rows).get(SUPPORT)
    if not isinstance(column, Ragged) or not len(column.values):
        return None
    column, lengths = column.on_host(), on_host(rows.lengths)
    tokens = on_host(rows.response_ids)[response_mask(rows)]  # [R]
    found = by_token(column, column.values.long(), lengths, tokens)
    found = torch.where(found == END, tokens[:, None], found)
    found[~(column.lengths > 0).repeat_interleave(lengths), 0] = -1
    return found


def token_counts(rows: Tokens) -> Tensor:
    """`[B]` int64, on the CPU: the tokens of each row that the model has to read."""
    prompts, responses = on_host(rows.prompt_ids.lengths), on_host(rows.lengths)
    return (prompts + responses - 1) * (responses > 0)


def pack(rows: Tokens, share_prefixes: bool = False, reader: PictureReader | None = None) -> ModelInput:
    """All rows in one line; a single dummy token where there is nothing to score.

    Args:
        rows: Prompts and responses on any device; the result is on the CPU.
        share_prefixes: Whether a prefix that several rows share is in the line only once.
        reader: Reader of the rows' pictures; None for a model that reads text alone.

    Raises:
        UserError: A row has a response and no prompt.
    """
    in_line = {
        name: data for name, data in columns_of(rows).items() if MODEL_INPUTS[name].model_input != "output layer"
    }
    rows = on_cpu(rows)
    counts = token_counts(rows)
    prompts = rows.prompt_ids.lengths
    if bool(((prompts == 0) & (rows.lengths > 0)).any()):
        row = int(((prompts == 0) & (rows.lengths > 0)).nonzero()[0])
        raise UserError(f"row {row} has an empty prompt, so nothing scores its first response token; drop the row")

    total = int(counts.sum())
    # For each token in the line: its place in its own row, and where that row's response begins.
    position_ids = torch.arange(total) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    response_start = prompts.repeat_interleave(counts)

    column = torch.arange(rows.response_ids.shape[1])
    mask = response_mask(rows)
    in_prompt = position_ids < response_start
    input_ids = torch.empty(total, dtype=torch.int64)
    input_ids[in_prompt] = rows.prompt_ids.values[(rows.lengths > 0).repeat_interleave(prompts)]
    input_ids[~in_prompt] = rows.response_ids[column < rows.lengths[:, None] - 1]
    scored = (position_ids >= response_start - 1).nonzero().flatten()

    lengths = counts[counts > 0]
    if total == 0:
        input_ids, position_ids, lengths = torch.tensor([[0], [0], [1]])
    line = ModelInput(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32),
        max_seqlen=int(lengths.max()),
        scored=scored,
        targets=rows.response_ids[mask],
        mask=mask,
        useful_tokens=total,
        columns={name: _in_line(name, data, counts, mask) for name, data in in_line.items()} if total else {},
    )
    if reader is not None:
        line = _with_pictures(line, reader, in_line.get(PICTURES), counts)
    return _shared(line) if share_prefixes else line


def _with_pictures(line: ModelInput, reader: PictureReader, column: Any, counts: Tensor) -> ModelInput:
    """The line with the pictures of its rows, and with the positions of tokens among pictures."""
    assert line.cu_seqlens is not None
    tokens = line.input_ids[0].split(line.cu_seqlens.diff().tolist())
    numbers = [] if column is None else [each.tolist() for each in column.on_host().take(counts.nonzero()[:, 0]).rows()]
    pictures, positions = reader.read(tokens, numbers or [[] for _ in tokens])
    return replace(line, pictures=pictures, position_ids=positions)


def _shared(line: ModelInput) -> ModelInput:
    """The line with each shared prefix once, rows in another order; scored tokens keep theirs. Unchanged if none is."""
    assert line.cu_seqlens is not None
    starts, rows = line.cu_seqlens.tolist(), _compared(line)
    order, shared = neighbours(rows)
    if not any(shared):
        return line
    keys, taken, fresh = [], [], []  # in the order of the line
    places = np.empty(starts[-1], np.int64)  # place in the new line of each token of this one
    before, end = np.empty(0, np.int64), 0
    for row, common in zip(order, shared, strict=True):
        own = len(rows[row]) - common
        before = np.concatenate([before[:common], np.arange(end, end + own)])
        places[starts[row] : starts[row + 1]] = before
        taken.append(np.arange(starts[row] + common, starts[row + 1]))
        keys.append(before)
        fresh.append(own)
        end += own
    chosen = torch.from_numpy(np.concatenate(taken))
    return replace(
        line,
        input_ids=line.input_ids[:, chosen],
        position_ids=line.position_ids[..., chosen],
        cu_seqlens=torch.tensor([0, *fresh]).cumsum(0).to(torch.int32),
        max_seqlen=max(fresh),
        scored=torch.from_numpy(places)[line.scored],
        useful_tokens=end,
        columns={
            name: data[chosen] if MODEL_INPUTS[name].per_read_token or name == PICTURES else data
            for name, data in line.columns.items()
        },
        prefixes=Prefixes.of(keys),
        pictures=None if line.pictures is None else line.pictures.moved(torch.from_numpy(places)),
    )


def _compared(line: ModelInput) -> list[NDArray[np.int64]]:
    """A number for each token of each row, equal where tokens are equal and are read with equal columns.

    No numbers of two rows are equal if the rows have a column with any number of entries, or other pictures.
    """
    assert line.cu_seqlens is not None
    read, columns = line.input_ids[0], []
    for name, data in line.columns.items():
        if MODEL_INPUTS[name].per_read_token:
            columns.append(data.flatten(1).long())
        elif name == PICTURES:
            columns.append(data[:, None])
        elif MODEL_INPUTS[name].kind is ColumnKind.RAGGED:
            lengths = line.cu_seqlens.diff().long()
            columns.append(torch.arange(len(lengths)).repeat_interleave(lengths)[:, None])
    if columns:
        read = torch.cat([read[:, None], *columns], 1).unique(dim=0, return_inverse=True)[1]
    return np.split(read.numpy(), line.cu_seqlens[1:-1].tolist())


def _in_line(name: str, data: Tensor | Ragged, counts: Tensor, mask: Tensor) -> Tensor:
    """A column as a line reads it, see `ModelInput`; rows without a response are not in the line."""
    if isinstance(data, Tensor):
        return on_host(data)[mask]
    if name == PICTURES:
        alike = dict[tuple[int, ...], int]()
        of_rows = [alike.setdefault(tuple(each.tolist()), len(alike)) for each in data.on_host().rows()]
        return torch.tensor(of_rows).repeat_interleave(counts)
    if not MODEL_INPUTS[name].per_read_token:
        return data.take(counts.nonzero()[:, 0]).values
    assert torch.equal(on_host(data.lengths), counts), f"`{name}` has an entry for each token that is read"
    return data.values


def pad(rows: Tokens, reader: PictureReader | None = None) -> ModelInput:
    """Like `pack`, but one sequence a line, right-padded. With causal attention, padding does not change the scores."""
    packed = pack(rows, reader=reader)
    assert packed.cu_seqlens is not None
    lengths = packed.cu_seqlens.diff()
    slots = torch.arange(packed.max_seqlen) < lengths[:, None]  # [S, L]
    at = slots.flatten().nonzero().flatten()  # [N], place of each token of the line
    positions = torch.zeros(*packed.position_ids.shape[:-2], *slots.shape, dtype=torch.int64)
    positions.flatten(-2)[..., at] = packed.position_ids[..., 0, :]
    return replace(
        packed,
        input_ids=torch.zeros_like(slots, dtype=torch.int64).masked_scatter(slots, packed.input_ids),
        position_ids=positions,
        cu_seqlens=None,
        scored=at[packed.scored],
        pictures=None if packed.pictures is None else packed.pictures.moved(at),
    )


def packed_micro_batches(token_counts: Tensor, budget: int, at_least: int = 1) -> list[Tensor]:
    """Split rows into micro-batches of at most `budget` tokens, with nearly even numbers of tokens.

    A row above the budget is alone in one. The split is a function of the arguments alone.

    Args:
        token_counts: `[B]`, tokens of each row.
        budget: Most tokens of a micro-batch.
        at_least: Least number of micro-batches; some may then be empty.

    Returns:
        Row numbers of each micro-batch, `[b]` int64 ascending.
    """
    counts = token_counts.tolist()
    number = max(1, at_least, -(-sum(min(tokens, budget) for tokens in counts) // budget))
    while True:
        split = even_parts(counts, number)
        if all(len(rows) <= 1 or sum(counts[row] for row in rows) <= budget for rows in split):
            return [torch.tensor(rows, dtype=torch.int64) for rows in split]
        number += 1


def patch_counts(rows: Tokens | Pairs, reader: PictureReader | None) -> Tensor:
    """`[B]` int64, patches that the tower of a model computes of each row's pictures."""
    column = getattr(rows, PICTURES, None) if isinstance(rows, Pairs) else columns_of(rows).get(PICTURES)
    if reader is None or not isinstance(column, Ragged) or not len(column.values):
        return torch.zeros(len(rows.prompt_ids), dtype=torch.int64)
    return torch.tensor([reader.patches(each.tolist()) for each in column.on_host().rows()])


def shared_micro_batches(
    rows: Tokens | Pairs, budget: int, at_least: int = 1, reader: PictureReader | None = None
) -> list[Tensor]:
    """Like `packed_micro_batches`, for rows that share prefixes: families stay together, with costs from `families`.

    A pair costs as much as the families of its two rows. Patches of pictures cost as much as tokens; those of a family
    are the patches of its row with most.
    """
    patches = patch_counts(rows, reader)
    if isinstance(rows, Pairs):
        pairs = zip(_by_row(rows.chosen), _by_row(rows.rejected), strict=True)
        of_rows = [([number], sum(cost for _, cost in families(pair, budget))) for number, pair in enumerate(pairs)]
    else:
        of_rows = families(_by_row(rows), budget)
    costs = torch.tensor([cost + int(patches[members].max()) for members, cost in of_rows], dtype=torch.int64)
    parts = packed_micro_batches(costs, budget, at_least)
    members = [[number for family in part.tolist() for number in of_rows[family][0]] for part in parts]
    return [torch.tensor(sorted(numbers), dtype=torch.int64) for numbers in members]


def _by_row(rows: Tokens) -> list[NDArray[np.int64]]:
    """The numbers of `_compared` for each row; none for a row without a response."""
    of_line = iter(_compared(pack(rows)))
    return [next(of_line) if length else np.empty(0, np.int64) for length in on_host(rows.lengths).tolist()]


def padded_micro_batches(token_counts: Tensor, budget: int, at_least: int = 1) -> list[Tensor]:
    """Like `packed_micro_batches`, with rows counted as padded to the longest; rows of similar length are together."""
    longest_first = torch.argsort(token_counts, descending=True, stable=True).tolist()
    split: list[list[int]] = []
    room = 0
    for row in longest_first:
        if room == 0:
            split.append([])
            room = max(1, budget // max(1, int(token_counts[row])))
        split[-1].append(row)
        room -= 1
    split += [[] for _ in range(max(1, at_least) - len(split))]
    return [torch.tensor(sorted(rows), dtype=torch.int64) for rows in split]
