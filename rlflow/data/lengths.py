"""Tokens of every row of a dataset, counted once: each rank counts a share, and the numbers are kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rlflow.data.columns import check_scored
from rlflow.data.prompts import Encoder, Example, PromptData
from rlflow.data.sources import Source
from rlflow.databuffer.message import from_message, to_message
from rlflow.databuffer.transport import Transport
from rlflow.environments.environment import Environment
from rlflow.errors import UserError, one_line
from rlflow.rewards.reward import Reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 1024  # rows that are encoded together, and so held in memory at once
CACHE_VARIABLE = "RLFLOW_CACHE"
VERSION = "2"  # of the numbers of a row, and of how rows are encoded
PROMPT, RESPONSE, DIGEST = 0, 1, slice(2, 4)  # columns


def count(source: Source, encode: Encoder, rows: range, reward: Reward | None = None) -> Tensor:
    """`[R, 4]` int32: tokens of each row's prompt and of its longest response, and a digest of its tokens and columns.

    A prompt with which a conversation begins has the tools in it that the policy may call.

    Raises:
        UserError: A row cannot be read, or lacks what the reward reads.
    """
    numbers = array("i")
    for start in range(rows.start, rows.stop, CHUNK):
        chunk = range(start, min(start + CHUNK, rows.stop))
        for row, example in zip(chunk, encode(source, chunk), strict=True):
            check_scored(example.row, reward, source.where(row))
            prompt = max(len(example.prompt_ids), begins(example.row, encode, source, row))
            numbers.extend([prompt, max(len(example.response_ids), len(example.rejected_ids))])
            numbers.frombytes(_digest(example, _as_json(example, source, row)))
    return torch.tensor(numbers, dtype=torch.int32).view(-1, 4)


def count_together(
    source: Source, encode: Encoder, mine: range, transport: Transport, reward: Reward | None = None
) -> Tensor:
    """`[N, 4]` int32, as of `count` for all rows; a collective of all ranks.

    Args:
        source: The rows.
        encode: Their tokens.
        mine: Rows that this rank counts; the ranks' follow one another.
        transport: To the other ranks.
        reward: That scores responses to these rows, if one does.

    Raises:
        UserError: A row of some rank cannot be read; on all ranks alike, of the first such row.
    """
    counted, wrong = torch.empty(0, 4, dtype=torch.int32), ""
    try:
        counted = count(source, encode, mine, reward)
    except UserError as error:
        wrong = str(error)
    for answer in transport.all_gather_ragged(to_message(f".{wrong}".encode())):
        if (first := from_message(answer).decode()[1:]) != "":
            raise UserError(first)
    return torch.cat([each.view(-1, 4) for each in transport.all_gather_ragged(counted.flatten())])


def cache_folder() -> Path | None:
    """Where counts are kept: in `$RLFLOW_CACHE`, else in the user's cache; None where that variable is empty."""
    named = os.environ.get(CACHE_VARIABLE)
    if named == "":
        return None
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named or Path(caches) / "rlflow") / "lengths"


def key_of(
    source: Source,
    data: PromptData,
    tokenizer: PreTrainedTokenizerBase,
    environment: Environment | None = None,
    reward: Reward | None = None,
) -> str | None:
    """A digest of all that the counts depend on: data, tokenizer, template, tools, reward; None where one has none."""
    of_source = source.digest()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if of_source is None or backend is None:
        return None
    of_tokenizer = [backend.to_str(), tokenizer.chat_template, tokenizer.eos_token_id]
    columns = [data.prompt, data.response, data.rejected, data.chat_template, data.system_prompt]
    of_reward = None if reward is None else [reward.reads, reward.checked_by]
    facts: list[Any] = [VERSION, of_source, of_tokenizer, columns, of_reward]
    if environment is not None:
        known = {name: [each.schemas, each.required] for name, each in environment.definitions.items()}
        facts += [known, data.renderer, environment.by]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def read_counts(key: str, rows: int) -> Tensor | None:
    """The counts kept under `key`; None where there are none, or where the file is damaged or of another version."""
    folder = cache_folder()
    path = None if folder is None else folder / f"{key}.safetensors"
    if path is None or not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            counts: Tensor = file.get_tensor("counts")
            sound = file.metadata() == _metadata(counts)
    except (SafetensorError, OSError):
        return None
    return counts if sound and counts.shape == (rows, 4) and counts.dtype == torch.int32 else None


def keep_counts(key: str, counts: Tensor) -> None:
    """Keep counts for later runs; where that cannot be, a line on the terminal says so.

    Whoever reads sees the whole file or none, however many write it at once.
    """
    folder = cache_folder()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as draft:
            written = Path(draft) / "counts"
            written.write_bytes(save({"counts": counts}, _metadata(counts)))
            os.replace(written, folder / f"{key}.safetensors")
    except OSError as error:
        print(
            f"lengths of prompts are not kept for later runs ({one_line(error)}); set {CACHE_VARIABLE} to a folder with"
            " space, or to nothing",
            file=sys.stderr,
        )


def _metadata(counts: Tensor) -> dict[str, str]:
    return {"version": VERSION, "sha256": hashlib.sha256(counts.numpy().tobytes()).hexdigest()}


def _digest(example: Example, columns: bytes) -> bytes:
    """8 bytes."""
    prompt, response, rejected = example.prompt_ids, example.response_ids, example.rejected_ids
    tokens = array("q", [len(prompt), len(response), len(columns), *prompt, *response, *rejected])
    return hashlib.blake2b(tokens.tobytes() + columns, digest_size=8).digest()


def begins(columns: dict[str, Any], encode: Encoder, source: Source, row: int) -> int:
    """Tokens with which a conversation begins on this row, as of `Encoder.begins`; what is wrong names its place."""
    try:
        return encode.begins(columns)
    except UserError as error:
        raise UserError(f"{source.where(row)}: {error}") from error


def _as_json(example: Example, source: Source, row: int) -> bytes:
    try:
        return json.dumps(example.row).encode()
    except TypeError as error:  # a date, bytes, an image
        raise UserError(
            f"{source.where(row)}: {error}, so the row cannot travel between ranks; convert or remove that column"
        ) from error
