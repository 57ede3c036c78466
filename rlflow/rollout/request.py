"""What is asked of an engine: single turns, and how much of it is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.errors import UserError


@dataclass(frozen=True)
class Turn:
    """One response, asked for while others are in progress.

    Attributes:
        prompt: Token ids.
        seed: See `sampling_seed`.
        longest: Tokens of the response, at most.
    """

    prompt: Sequence[int]
    seed: int
    longest: int


def check_asked(n: int, longest: int, most: int) -> None:
    """Refuse what a node asks an engine for.

    Args:
        n: Responses to each row.
        longest: Tokens of a response at most.
        most: Tokens that memory is planned for.

    Raises:
        UserError: It asks for none, or for longer ones.
    """
    if longest > most:
        raise UserError(
            f"`max_new_tokens` is {longest} and `module.max_response_length` is {most}, for which memory is planned;"
            " raise the latter"
        )
    if longest < 1:
        raise UserError(f"`max_new_tokens` is {longest}; a response has at least one token, so give 1 or more")
    if n < 1:
        raise UserError(f"`n` is {n}; generate 1 response to each row or more")
