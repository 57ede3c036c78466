"""The turns of conversations: what is given from each on, and what belongs to its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.functional.shapes import float_dtype


def rewards_to_go(rewards: Tensor, returns: Tensor, turns: Tensor, most: int) -> Tensor:
    """`G_k = R - sum_{j < k} e_j`, what a conversation is given from turn `k` on. Detached.

    `R` has the rewards of all turns in it, and may have more, such as a verifier's score, which is given at the end.
    From the last turn on it is that of the last turn.

    Args:
        rewards: `[B]`, of whole conversations.
        returns: `[B, K]`, the reward of each turn, 0 beyond a row's own.
        turns: `[B]`, how many turns each has, 1 or more.
        most: Turns that a conversation may have, `K` or more.

    Returns:
        `[B, most]`, in the dtype of the rewards.
    """
    earned = returns.detach().double().cumsum(dim=1)
    before = torch.cat([earned.new_zeros(len(earned), 1), earned], dim=1)  # of turn k what was given before it
    numbers = torch.arange(most, device=turns.device)
    own = torch.minimum(numbers, turns[:, None] - 1)  # [B, most]
    return (rewards.detach().double()[:, None] - before.gather(1, own)).to(float_dtype(rewards))


def at_turns(x: Tensor, turn: Tensor) -> Tensor:
    """What each token's turn has, of `x` `[B, K]`; tokens of no turn get the first one's.

    Args:
        x: A number for each turn.
        turn: `[B, T]` int64, the turn of each token; below 0 where the policy did not write it.

    Returns:
        `[B, T]`.
    """
    return x.gather(1, turn.clamp(min=0))
