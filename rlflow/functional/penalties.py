"""Terms that are added to a reward."""

from __future__ import annotations

from torch import Tensor

from rlflow.errors import UserError
from rlflow.functional.shapes import float_dtype


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int | float) -> Tensor:
    """0 up to `max_length - buffer` tokens, from there down in a straight line to -1 at `max_length`, and -1 beyond.

    The soft overlong punishment of DAPO, arXiv 2503.14476, equation 13. Detached.

    Args:
        lengths: `[B]`, response tokens.
        max_length: Tokens at which the penalty is full.
        buffer: Tokens before `max_length` over which it grows; below 1 their share of `max_length`, at least one token.

    Returns:
        `[B]`, between -1 and 0, in the default floating dtype unless `lengths` has one.

    Raises:
        UserError: As `overlong_tokens`.
    """
    tokens = overlong_tokens(max_length, buffer)
    return ((max_length - tokens - lengths.detach().double()) / tokens).clamp(-1.0, 0.0).to(float_dtype(lengths))


def overlong_tokens(max_length: int, buffer: int | float) -> int:
    """Tokens before `max_length` over which the penalty grows: `buffer`, or below 1 its share, at least one token.

    Raises:
        UserError: The buffer is neither a whole number from 1 to `max_length` nor between 0 and 1.
    """
    if not (0 < buffer < 1 or (1 <= buffer <= max_length and buffer == int(buffer))):
        raise UserError(
            f"`overlong_buffer` is {buffer}; give a whole number of tokens from 1 to"
            f" `max_response_length`, {max_length}, a share of it between 0 and 1, or null for no penalty"
        )
    return int(buffer) if buffer >= 1 else max(1, round(buffer * max_length))
