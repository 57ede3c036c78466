"""One look at all rows before the first step: what is too long, and a digest of what is not."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.data.lengths import DIGEST, PROMPT, RESPONSE
from rlflow.data.prompts import PromptData
from rlflow.data.sources import Source
from rlflow.errors import UserError

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


def scan(source: Source, data: PromptData, counts: Tensor) -> Scan:
    """Which rows to draw from.

    Args:
        source: The rows.
        data: What is too long.
        counts: Of every row, as of `rlflow.data.lengths.count`.

    Raises:
        UserError: There is no row to keep, or a row is too long and `data.overlong` is `error`.
    """
    if len(counts) == 0:
        raise UserError(f"{source.name} has no rows, so there is nothing to train on or to validate; check the dataset")
    prompts, responses = counts[:, PROMPT], counts[:, RESPONSE]
    fits = prompts <= data.max_prompt_length
    if data.max_response_length is not None:
        fits &= responses <= data.max_response_length
    kept, dropped = fits.nonzero()[:, 0], (~fits).nonzero()[:, 0]
    places = tuple(source.where(row) for row in dropped[:SHOWN].tolist())
    if len(dropped) and (data.overlong == "error" or not len(kept)):
        limits = f"`data.max_prompt_length` {data.max_prompt_length}"
        longest = f"the longest prompt has {int(prompts.max())}"
        if data.max_response_length is not None:
            limits += f" or `data.max_response_length` {data.max_response_length}"
            longest += f", the longest response {int(responses.max())}"
        raise UserError(
            f"{len(dropped):,} of {len(counts):,} rows exceed {limits} tokens, the first of them {places[0]};"
            f" {longest}. Raise {_enough(data, prompts, responses)}"
            + (", or set `data.overlong: drop`" if len(kept) else "")
        )
    return Scan(
        source=source.name,
        kept=kept,
        rows=len(counts),
        examples=places,
        longest_prompt=int(prompts[kept].max()),
        longest_response=int(responses.max()),
        longest_row=int((prompts + responses)[kept].max()),
        digest=hashlib.sha256(counts[kept][:, DIGEST].contiguous().numpy().tobytes()).hexdigest(),
    )


def _enough(data: PromptData, prompts: Tensor, responses: Tensor) -> str:
    """The limits that are too low, and the least that keeps all rows; where rows are dropped, that keeps one."""
    limits = {"max_prompt_length": data.max_prompt_length}
    lengths = {"max_prompt_length": prompts}
    if data.max_response_length is not None:
        limits["max_response_length"] = data.max_response_length
        lengths["max_response_length"] = responses
    if data.overlong == "error":
        needed = {name: int(of_rows.max()) for name, of_rows in lengths.items()}
    else:
        beyond = torch.stack([(of_rows - limits[name]).clamp(min=0) for name, of_rows in lengths.items()])
        nearest = int(beyond.sum(dim=0).argmin())
        needed = {name: int(of_rows[nearest]) for name, of_rows in lengths.items()}
    return " and ".join(f"`data.{name}` to at least {each}" for name, each in needed.items() if each > limits[name])
