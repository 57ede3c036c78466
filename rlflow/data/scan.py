"""The scan of all rows before the first step: their tokens, which the steps reuse; rows that are too long; a digest.

Each rank looks at a share of the rows. Numbers and token ids are stored on disk for the other ranks and later runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlflow.data.prompts import Encoder, Example, PromptData
from rlflow.data.sources import Source, row_as_json
from rlflow.databuffer.transport import Transport
from rlflow.environments.environment import Environment
from rlflow.errors import UserError, one_line
from rlflow.loggers.console import named_if_long
from rlflow.models.picture_processor import PictureProcessor
from rlflow.process import status
from rlflow.rewards.reward import Reward, read_column

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 1024  # rows that are encoded together, and so held in memory together as lists
TRAVELLING = 2**20  # tokens of each rank that are sent together
CACHE_VARIABLE = "RLFLOW_CACHE"
VERSION = "8"  # of the file, the numbers of a row, and of how rows are encoded
HEAD = 32  # bytes of the digest that a file begins with
PROMPT, RESPONSE, REJECTED, BEGINS, PICTURES, DIGEST = 0, 1, 2, 3, 4, slice(5, 7)  # numbers of a row
NUMBERS = 7  # of a row
UNREADABLE = 2**31 - 1  # what a conversation begins with, in a row with a picture that cannot be read
SHOWN = 3  # dropped rows named as examples


@dataclass(frozen=True, eq=False)
class Scan:
    """The result of a scan. As a string: one line for the user.

    Attributes:
        source: The dataset's name.
        kept: `[K]` int64, rows of the source to draw from, ascending.
        rows: Rows of the source.
        unreadable: Rows with a picture that cannot be read.
        examples: Places of the first few rows that are too long, or have such a picture.
        longest_prompt: Tokens of the longest prompt, of the rows to draw from.
        longest_response: Tokens of the longest response, of all rows; 0 without a response column.
        longest_row: Tokens of the longest row, prompt and response together, of the rows to draw from.
        most_pictures: Pictures of the row that has most of them, of the rows to draw from.
        digest: Digest of the rows to draw from, tokens and columns; equal where ranks, or a run and its continuation,
            see the same data.
    """

    source: str
    kept: Tensor
    rows: int
    unreadable: int
    examples: tuple[str, ...]
    longest_prompt: int
    longest_response: int
    longest_row: int
    most_pictures: int
    digest: str

    @property
    def dropped(self) -> int:
        """Number of rows that are too long, or have a picture that cannot be read."""
        return self.rows - len(self.kept)

    def __str__(self) -> str:
        line = f"{self.source}: {len(self.kept):,} of {self.rows:,} rows kept"
        broken = f" or with images that cannot be read ({self.unreadable:,})" if self.unreadable else ""
        return (
            f"{line}; {self.dropped:,} too long{broken}, such as {', '.join(self.examples)}" if self.dropped else line
        )


def scan(source: Source, data: PromptData, numbers: Tensor) -> Scan:
    """Decide which rows to draw from.

    Args:
        source: The rows.
        data: Settings that say what is too long.
        numbers: Numbers of every row, see `TokenizedRows`.

    Raises:
        UserError: There is no row to keep, or a row is too long and `data.overlong_rows` is `error`.
    """
    if len(numbers) == 0:
        raise UserError(f"{source.name} has no rows, so there is nothing to train on or to validate; check the dataset")
    prompts = torch.maximum(numbers[:, PROMPT], numbers[:, BEGINS])
    responses = torch.maximum(numbers[:, RESPONSE], numbers[:, REJECTED])
    fits = prompts <= data.max_prompt_length
    if data.max_response_length is not None:
        fits &= responses <= data.max_response_length
    kept, dropped = fits.nonzero()[:, 0], (~fits).nonzero()[:, 0]
    places = tuple(source.where(row) for row in dropped[:SHOWN].tolist())
    unreadable = (prompts == UNREADABLE).nonzero()[:, 0]
    if len(unreadable) and (data.overlong_rows == "error" or not len(kept)):
        raise UserError(
            f"{len(unreadable):,} of {len(numbers):,} rows have an image that cannot be read, the first of them"
            f" {source.where(int(unreadable[0]))}; correct or remove them"
            + (", or set `data.overlong_rows: drop`" * bool(len(kept)))
        )
    if len(dropped) and (data.overlong_rows == "error" or not len(kept)):
        limits = {"prompt": (data.max_prompt_length, prompts), "response": (data.max_response_length, responses)}
        exceeded, enough = list[str](), list[str]()
        for what, (limit, lengths) in limits.items():
            if limit is not None and (longest := int(lengths.max())) > limit:
                exceeded.append(f"`data.max_{what}_length` {limit}")
                enough.append(f"`data.max_{what}_length` to at least {longest}")
        raise UserError(
            f"{len(dropped):,} of {len(numbers):,} rows exceed {' or '.join(exceeded)} tokens, the first of them"
            f" {places[0]}. To keep all, raise {' and '.join(enough)}"
            + (", or set `data.overlong_rows: drop`" if len(kept) else "")
        )
    return Scan(
        source=source.name,
        kept=kept,
        rows=len(numbers),
        unreadable=len(unreadable),
        examples=places,
        longest_prompt=int(prompts[kept].max()),
        longest_response=int(responses.max()),
        longest_row=int((prompts + responses)[kept].max()),
        most_pictures=int(numbers[kept][:, PICTURES].max()),
        digest=hashlib.sha256(numbers[kept][:, DIGEST].contiguous().numpy().tobytes()).hexdigest(),
    )


@dataclass(frozen=True, eq=False)
class TokenizedRows:
    """Rows in tokens, with the numbers of tokens in their parts.

    A row with the prompt `[7, 8]` and the response `[9, 2]`, whose first token alone the policy wrote, has the `ids`
    `7, 8, 9, ~2`; its `numbers` begin with `2, 2, 0`.

    Attributes:
        numbers: `[R, 7]` int32: of each row the tokens of its prompt, of its response and of its rejected response;
            those with which a conversation begins, the tools that the policy may call among them; the number of its
            pictures; and a digest of its tokens and columns.
        ids: Int32, the rows' token ids one after another, prompt, response and rejected response; `~id` of a response's
            token that the policy did not write. None where other ranks have them.
    """

    numbers: Tensor
    ids: Tensor | None

    @cached_property
    def ends(self) -> Tensor:
        """`[R]` int64, the place in `ids` after the last of each row."""
        return self.numbers[:, :BEGINS].sum(dim=1).cumsum(dim=0)

    def examples(self, source: Source, rows: Sequence[int], encode: Encoder | None = None) -> list[Example]:
        """The given rows of the source, in that order, with the token ids that were counted.

        Args:
            source: The rows.
            rows: Numbers of rows.
            encode: Encoder of rows that may have pictures, to look for them; None where no row has any.

        Raises:
            UserError: A row is not what it was when it was counted.
        """
        values = source.read(rows) if rows else []
        return [self._example(row, value, source.where(row), encode) for row, value in zip(rows, values, strict=True)]

    def _example(self, row: int, value: dict[str, Any], place: str, encode: Encoder | None) -> Example:
        assert self.ids is not None
        prompt, response, rejected = self.numbers[row, :BEGINS].tolist()
        end = int(self.ends[row])
        ids = self.ids[end - prompt - response - rejected : end].tolist()
        spoken = ids[prompt : prompt + response]
        written = [each >= 0 for each in spoken]
        said = [each if each >= 0 else ~each for each in spoken]
        parts = ids[:prompt], said, ids[prompt + response :], None if all(written) else written
        found = Example(value, *parts)
        if encode is not None:
            found = replace(found, row=encode.sent(value), pictures=encode.picture_count(value, place))
        if _digest(found, row_as_json(found.row, place).encode()) != self.numbers[row, DIGEST].numpy().tobytes():
            raise UserError(
                f"{place} has changed since all rows were scanned: the data changed, or gives another row at each"
                " reading; start again, with data that does not change"
            )
        return found


def count(source: Source, encode: Encoder, rows: range, reward: Reward | None = None) -> TokenizedRows:
    """Encode rows, and count and check them. If it takes long, rank 0 names it on the terminal.

    Raises:
        UserError: A row cannot be read, or lacks what the reward reads.
    """
    if not status.is_first():
        return _count(source, encode, rows, reward)
    with named_if_long(f"tokenizing {len(rows):,} rows of {source.name}", partial(print, flush=True)):
        return _count(source, encode, rows, reward)


def _count(source: Source, encode: Encoder, rows: range, reward: Reward | None) -> TokenizedRows:
    numbers, ids = array("i"), array("i")
    for start in range(rows.start, rows.stop, CHUNK):
        chunk = range(start, min(start + CHUNK, rows.stop))
        for row, example in zip(chunk, encode(source, chunk), strict=True):
            place = source.where(row)
            begins = UNREADABLE if example.pictures is None else checked(example.row, encode, reward, place)
            begins += example.picture_tokens if begins else 0
            spoken = example.response_ids
            if example.written is not None:
                spoken = [each if own else ~each for each, own in zip(spoken, example.written, strict=True)]
            parts = example.prompt_ids, spoken, example.rejected_ids
            numbers.extend([*map(len, parts), begins, example.pictures or 0])
            numbers.frombytes(_digest(example, row_as_json(example.row, place).encode()))
            for part in parts:
                ids.extend(part)
    return TokenizedRows(_int32(numbers).view(-1, NUMBERS), _int32(ids))


def count_together(
    source: Source,
    encode: Encoder,
    mine: range,
    transport: Transport,
    key: str,
    keeps: bool,
    reward: Reward | None = None,
) -> TokenizedRows:
    """Count all rows, a share of them on this rank; a collective of all ranks.

    Args:
        source: The rows.
        encode: Encoder of their tokens.
        mine: Rows that this rank counts; the ranks' follow one another.
        transport: Transport to the other ranks.
        key: Key of the rows, see `key_of`.
        keeps: Whether this rank stores all rows on disk.
        reward: Reward that scores responses to these rows, if one does.

    Returns:
        All rows; without ids where nobody keeps them, and rows are tokenised again as they are drawn.

    Raises:
        UserError: A row of some rank cannot be read; on all ranks alike, of the first such row.
    """
    counted, wrong = TokenizedRows(torch.empty(0, NUMBERS, dtype=torch.int32), None), ""
    try:
        counted = count(source, encode, mine, reward)
    except UserError as error:
        wrong = str(error)
    for first in transport.gather_bytes(wrong.encode()):
        if first:
            raise UserError(first.decode())
    of_all = transport.all_gather_ragged(counted.numbers.flatten())
    numbers = torch.cat([each.view(-1, NUMBERS) for each in of_all])
    pieces = _pieces_of_all(counted, transport)
    if keeps:
        keep_counted(key, numbers, pieces)
    for _ in pieces:  # what it left out
        pass
    transport.all_gather(torch.zeros(1))  # now all are stored
    return read_counted(key, len(source)) or TokenizedRows(numbers, None)


def _pieces_of_all(mine: TokenizedRows, transport: Transport) -> Iterator[tuple[int, Tensor]]:
    """The token ids of all ranks' rows in pieces, with their places; a collective that all ranks exhaust."""
    assert mine.ids is not None
    totals = [int(total) for total in transport.all_gather(torch.tensor([len(mine.ids)]))]
    for start in range(0, max(totals), TRAVELLING):
        pieces = transport.all_gather_ragged(mine.ids[start : start + TRAVELLING])
        for rank, piece in enumerate(pieces):
            yield sum(totals[:rank]) + start, piece


def cache_folder() -> Path | None:
    """Folder of stored tokens of rows: `$RLFLOW_CACHE`, else in the user's cache; None where that variable is empty."""
    named = os.environ.get(CACHE_VARIABLE)
    if named == "":
        return None
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named or Path(caches) / "rlflow") / "tokens"


def key_of(
    source: Source,
    data: PromptData,
    tokenizer: PreTrainedTokenizerBase,
    environment: Environment | None = None,
    reward: Reward | None = None,
    processor: PictureProcessor | None = None,
) -> str | None:
    """A digest of all that the counts depend on: data, tokenizer, template, tools, reward; None if one has none.

    The reward is left out where its `check` is a user's own; then its rows are counted in every run.
    The files of pictures are not read for it. A picture of another size than when it was counted is refused later.
    """
    of_source = source.digest()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if of_source is None or backend is None:
        return None
    of_tokenizer = [backend.to_str(), tokenizer.chat_template, tokenizer.eos_token_id]
    columns = [data.prompt, data.response, data.rejected, data.chat_template, data.system_prompt]
    of_reward = None if reward is None or reward.checked_by is None else [dict(reward.reads), reward.checked_by]
    writers = [data.renderer, data.tool_calls]  # of lists of messages, with an environment and without
    facts: list[Any] = [VERSION, of_source, of_tokenizer, columns, writers, of_reward]
    if processor is not None:
        facts += [processor.facts(), data.images]
    if environment is not None:
        known = {name: [each.schemas, each.required] for name, each in environment.definitions.items()}
        facts += [known, environment.column]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def read_counted(key: str, rows: int) -> TokenizedRows | None:
    """The rows stored under `key`; None if there are none, they are damaged, or their number is another.

    The token ids are in memory only where they are read.
    """
    folder = cache_folder()
    if folder is None:
        return None
    path = folder / f"{key}.rows"
    try:
        with path.open("rb", buffering=0) as file:
            if file.read(HEAD) != hashlib.file_digest(file, "sha256").digest():
                return None
        found = torch.from_file(str(path), shared=False, size=path.stat().st_size // 4, dtype=torch.int32)
    except OSError:
        return None
    numbers, ids = found[HEAD // 4 :].tensor_split([NUMBERS * rows])
    if len(numbers) != NUMBERS * rows:
        return None
    numbers = numbers.clone().view(rows, NUMBERS)
    return TokenizedRows(numbers, ids) if len(ids) == numbers[:, :BEGINS].sum() else None


def keep_counted(key: str, numbers: Tensor, pieces: Iterable[tuple[int, Tensor]]) -> None:
    """Store rows for later runs; if that fails, a line on the terminal says so.

    The file has a SHA-256, the numbers and the token ids. Whoever reads it sees all of it or nothing, however many
    write at the same time.

    Args:
        key: Key of the rows, see `key_of`.
        numbers: Numbers of all rows, see `TokenizedRows`.
        pieces: The token ids in pieces, with their places.
    """
    folder = cache_folder()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as draft:
            written = Path(draft) / "rows"
            with written.open("wb") as file:
                file.write(bytes(HEAD) + numbers.numpy().tobytes())
                for start, piece in pieces:
                    file.seek(HEAD + numbers.nbytes + 4 * start)
                    file.write(piece.numpy().data)
            with written.open("r+b", buffering=0) as file:
                file.seek(HEAD)
                digest = hashlib.file_digest(file, "sha256").digest()
                file.seek(0)
                file.write(digest)
            os.replace(written, folder / f"{key}.rows")
    except OSError as error:
        print(
            f"tokens of prompts are not stored for later runs ({one_line(error)}); set {CACHE_VARIABLE} to a folder"
            " with space, or to nothing",
            file=sys.stderr,
        )


def _int32(numbers: array[int]) -> Tensor:
    """The array's memory as a tensor."""
    return torch.frombuffer(numbers, dtype=torch.int32) if numbers else torch.empty(0, dtype=torch.int32)


def _digest(example: Example, columns: bytes) -> bytes:
    """8 bytes."""
    prompt, response, rejected = example.prompt_ids, example.response_ids, example.rejected_ids
    tokens = array("q", [len(prompt), len(response), len(columns), *prompt, *response, *rejected])
    return hashlib.blake2b(tokens.tobytes() + columns, digest_size=8).digest()


def checked(row: dict[str, Any], encode: Encoder, reward: Reward | None, place: str) -> int:
    """Refuse a row that the reward could not score, or from which no conversation could begin.

    Args:
        row: Row of the dataset.
        encode: Encoder that knows the environment, see `Encoder.begins`.
        reward: Reward that says what it reads, see `Reward.reads` and `Reward.check`; None where none scores.
        place: Place of the row, for errors.

    Returns:
        Tokens with which a conversation begins on this row; 0 if none does.

    Raises:
        UserError: The row lacks a column, has null in it, or has what cannot be read.
    """
    for name, may_be_null in ({} if reward is None else reward.reads).items():
        read_column(row, name, may_be_null, place)
    try:
        if reward is not None:
            reward.check(row)
        return encode.begins(row)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
