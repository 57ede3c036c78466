"""Terms that are added to a reward."""

from __future__ import annotations

from torch import Tensor

from rlflow.errors import UserError
from rlflow.functional.shapes import float_dtype


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """0 up to `max_length - buffer` tokens, from there down in a straight line to -1 at `max_length`, and -1 beyond.

    The soft overlong punishment of DAPO, arXiv 2503.14476, equation 13. Detached.

    Args:
        lengths: `[B]`, response tokens.
        max_length: Tokens at which the penalty is full.
        buffer: Tokens before `max_length` over which it grows.

    Returns:
        `[B]`, between -1 and 0, in the default floating dtype unless `lengths` has one.

    Raises:
        UserError: The buffer is not between 1 and `max_length`.
    """
    if not 1 <= buffer <= max_length:
        raise UserError(f"the overlong `buffer` is {buffer}; it must lie between 1 and `max_length`, {max_length}")
    return ((max_length - buffer - lengths.detach().double()) / buffer).clamp(-1.0, 0.0).to(float_dtype(lengths))
