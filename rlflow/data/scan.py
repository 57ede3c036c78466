"""One look at every row before the first step: what is too long, what cannot be read, and a digest of it all."""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.data.prompts import Encoder, Example, PromptData
from rlflow.data.sources import Source
from rlflow.errors import UserError

CHUNK = 1024  # rows that are encoded together, and so held in memory at once
SHOWN = 3  # dropped rows named as examples


@dataclass(frozen=True, eq=False)
class Scan:
    """What a scan found. As a string: one line for the user.

    Attributes:
        source: The dataset's name.
        kept: `[K]` int64, rows of the source to draw from, ascending.
        rows: Rows of the source.
        examples: Places of the first few rows that are too long.
        longest_prompt: In tokens, of the rows that are kept.
        longest_response: In tokens, of all rows; 0 without a response column.
        longest_row: In tokens, prompt and response together, of the rows that are kept.
        digest: Of the kept rows, tokens and columns; equal where ranks, or a run and its continuation, see the same
            data.
    """

    source: str
    kept: Tensor
    rows: int
    examples: tuple[str, ...]
    longest_prompt: int
    longest_response: int
    longest_row: int
    digest: str

    @property
    def dropped(self) -> int:
        """How many rows are too long."""
        return self.rows - len(self.kept)

    def __str__(self) -> str:
        line = f"{self.source}: {len(self.kept):,} of {self.rows:,} rows kept"
        return f"{line}; {self.dropped:,} too long, such as {', '.join(self.examples)}" if self.dropped else line


def scan(source: Source, data: PromptData, encode: Encoder) -> Scan:
    """Encode every row once, a chunk at a time.

    Raises:
        UserError: There is no row to keep, a row cannot be read, or a row is too long and `data.overlong` is `error`.
    """
    if len(source) == 0:
        raise UserError(f"{source.name} has no rows, so there is nothing to train on or to validate; check the dataset")
    kept, dropped = array("q"), array("q")
    longest_prompt = longest_response = longest_kept = longest_row = 0
    digest = hashlib.sha256()
    for start in range(0, len(source), CHUNK):
        rows = range(start, min(start + CHUNK, len(source)))
        for row, example in zip(rows, encode(source, rows), strict=True):
            columns = _as_json(example, source, row)
            longest_prompt = max(longest_prompt, len(example.prompt_ids))
            longest_response = max(longest_response, _longest_response(example))
            if _is_overlong(example, data):
                dropped.append(row)
            else:
                kept.append(row)
                longest_kept = max(longest_kept, len(example.prompt_ids))
                longest_row = max(longest_row, len(example.prompt_ids) + _longest_response(example))
                prompt, response, rejected = example.prompt_ids, example.response_ids, example.rejected_ids
                digest.update(array("q", [len(prompt), len(response), len(columns), *prompt, *response, *rejected]))
                digest.update(columns)
    places = tuple(source.where(row) for row in dropped[:SHOWN])
    if dropped and (data.overlong == "error" or not kept):
        limits = f"`data.max_prompt_length` {data.max_prompt_length}"
        longest = f"the longest prompt has {longest_prompt}"
        if data.max_response_length is not None:
            limits += f" or `data.max_response_length` {data.max_response_length}"
            longest += f", the longest response {longest_response}"
        raise UserError(
            f"{len(dropped):,} of {len(source):,} rows exceed {limits} tokens, the first of them {places[0]};"
            f" {longest}. Raise the limit" + (", or set `data.overlong: drop`" if kept else "")
        )
    found = torch.tensor(kept, dtype=torch.int64)
    lengths = longest_kept, longest_response, longest_row
    return Scan(source.name, found, len(source), places, *lengths, digest.hexdigest())


def _is_overlong(example: Example, data: PromptData) -> bool:
    response_limit = data.max_response_length
    return len(example.prompt_ids) > data.max_prompt_length or (
        response_limit is not None and _longest_response(example) > response_limit
    )


def _longest_response(example: Example) -> int:
    return max(len(example.response_ids), len(example.rejected_ids))


def _as_json(example: Example, source: Source, row: int) -> bytes:
    try:
        return json.dumps(example.row).encode()
    except TypeError as error:  # a date, bytes, an image
        raise UserError(
            f"{source.where(row)}: {error}, so the row cannot travel between ranks; convert or remove that column"
        ) from error
