"""How long the sequences may be that a model reads, and what a token of them takes in a cache."""

from __future__ import annotations

from typing import Any

import torch

from rlflow.errors import UserError
from rlflow.models.attention import Heads

ORIGINAL = "original_max_position_embeddings"


def positions(config: Any) -> int | None:
    """Tokens of the longest sequence that a model takes, by its transformers configuration; None without a limit.

    Where the rotary embedding is `longrope`, that is the length before it was extended. One sequence beyond it would
    change the frequencies of all that are packed with it.
    """
    limit = _limit(config)
    return None if limit is None else limit[1]


def rotary_embeddings(config: Any) -> list[dict[str, Any]]:
    """The `rope_parameters` of a transformers configuration: of all layers, or of each kind of layers."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [of_kind for of_kind in rope.values() if isinstance(of_kind, dict)]
    return kinds or [rope]


def _limit(config: Any) -> tuple[str, int] | None:
    """The setting that limits the length of sequences, and the limit."""
    for rope in rotary_embeddings(config):
        if rope.get("rope_type") == "longrope":
            return ORIGINAL, rope[ORIGINAL]
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    if limit is None:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "linear":  # its factor is not yet in the limit
        limit = int(limit * rope["factor"])
    return "max_position_embeddings", limit


def check_positions(config: Any, tokens: int, role: str, of: str, prompt: int | None = None) -> None:
    """Refuse sequences that are longer than a model takes.

    Args:
        config: The model's transformers configuration.
        tokens: Of the longest sequence.
        role: For the message.
        of: What the sequence is, for the message.
        prompt: Tokens of it that are the prompt's, where the rest is a response that is generated.

    Raises:
        UserError: They are longer.
    """
    limit = _limit(config)
    if limit is None or tokens <= limit[1]:
        return
    lower = "`data.max_prompt_length` or `module.max_response_length`"
    if prompt is not None and prompt < limit[1]:
        lower = f"`module.max_response_length` to at most {limit[1] - prompt}, or `data.max_prompt_length`"
    elif prompt is not None:
        lower = f"`data.max_prompt_length` to less than {limit[1]}"
    raise UserError(
        f"`{role}` reads {of}, {tokens} tokens, and its model takes {limit[1]} (`{limit[0]}` of its config.json);"
        f" lower {lower}, or take a model of longer context"
    )


def cached_bytes(config: Any, dtype: torch.dtype, ranks: int) -> int:
    """Bytes of the keys and values of a token on each of the ranks that share a model.

    Layers with a sliding window are left out, for they forget: the least that a long sequence takes.
    """
    heads = Heads.of(config)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        layers = 0 if getattr(text, "sliding_window", None) else heads.layers
    else:
        layers = list(kinds).count("full_attention")
    return 2 * layers * max(1, heads.shared // ranks) * heads.width * dtype.itemsize
