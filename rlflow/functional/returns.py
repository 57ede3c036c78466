"""Rewards, returns and advantages along the tokens and turns of a response; and the critic's loss.

Returns and advantages are constants to the gradient: they are computed from detached inputs in float64, and returned in
the dtype of the values, or of the rewards if there are no values. Positions where the mask is 0 are skipped: padding,
and the output of tools between generated tokens. Rewards and values at these positions are ignored, and no discount is
taken for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.functional.shapes import float_dtype


def last_token_rewards(scores: Tensor, mask: Tensor, penalty: Tensor | None = None) -> Tensor:
    """The score of each response as the reward of its last generated token, minus a penalty for each token.

    Args:
        scores: `[B]`, one for each response.
        mask: `[B, T]`, nonzero on generated tokens. A row without generated tokens has no reward.
        penalty: `[B, T]`, such as a divergence from the reference (InstructGPT, arXiv 2203.02155, eq. 2); None is 0.

    Returns:
        `[B, T]`, detached, in the dtype of the scores.
    """
    generated = mask.bool()
    left = generated.flip(1).cumsum(1).flip(1)  # generated tokens from here to the end
    rewards = torch.where(generated & (left == 1), scores.detach().unsqueeze(1), 0.0).to(float_dtype(scores))
    return rewards if penalty is None else rewards - penalty.detach()


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int | float) -> Tensor:
    """0 up to `max_length - buffer` tokens, then linearly down to -1 at `max_length`, and -1 for longer responses.

    The soft overlong punishment of DAPO, arXiv 2503.14476, equation 13. Detached.

    Args:
        lengths: `[B]`, response tokens.
        max_length: Number of tokens at which the penalty is -1.
        buffer: Number of tokens before `max_length` over which the penalty grows. Below 1 it is a share of
            `max_length`, of at least one token.

    Returns:
        `[B]`, between -1 and 0, in the dtype of `lengths` if that is floating, else in the default floating dtype.

    Raises:
        UserError: As `overlong_tokens`.
    """
    tokens = overlong_tokens(max_length, buffer)
    return ((max_length - tokens - lengths.detach().double()) / tokens).clamp(-1.0, 0.0).to(float_dtype(lengths))


def overlong_tokens(max_length: int, buffer: int | float) -> int:
    """Number of tokens before `max_length` over which the penalty of `overlong_penalty` grows.

    It is `buffer`; if `buffer` is below 1, it is this share of `max_length`, at least one token.

    Raises:
        UserError: The buffer is neither a whole number from 1 to `max_length` nor between 0 and 1.
    """
    if not (0 < buffer < 1 or (1 <= buffer <= max_length and buffer == int(buffer))):
        raise UserError(
            f"`overlong_buffer` is {buffer}; give a whole number of tokens from 1 to"
            f" `max_response_length`, {max_length}, a share of it between 0 and 1, or null for no penalty"
        )
    return int(buffer) if buffer >= 1 else max(1, round(buffer * max_length))


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation. `t` is a generated token of a response, and `t'` its next generated token:

        delta_t = r_t + gamma V_t' - V_t
        A_t     = delta_t + gamma lam A_t'
        R_t     = A_t + V_t

    After the last token `A` is 0 and `V` is `bootstrap`. arXiv 1506.02438, equation 16. Detached.

    Args:
        rewards: `[B, T]`. A reward for the whole response is on its last generated token.
        values: `[B, T]`, the critic's value before each token.
        mask: `[B, T]`, nonzero on generated tokens.
        gamma: Discount of a token.
        lam: Decay of the sum over temporal differences.
        bootstrap: `[B]`, the value after the last token, for responses that were cut; None for 0 everywhere.

    Returns:
        Advantages and returns, `[B, T]` each, 0 where the mask is 0.
    """
    r, v, generated = rewards.detach().double(), values.detach().double(), mask.bool()
    next_advantage = v.new_zeros(len(v))
    next_value = next_advantage if bootstrap is None else bootstrap.detach().double().reshape(len(v))
    advantages = torch.zeros_like(v)
    for t in reversed(range(v.shape[1])):
        delta = r[:, t] + gamma * next_value - v[:, t]
        next_advantage = torch.where(generated[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(generated[:, t], v[:, t], next_value)
        advantages[:, t] = next_advantage
    returns = advantages + v
    dtype = float_dtype(values)
    return advantages.where(generated, 0.0).to(dtype), returns.where(generated, 0.0).to(dtype)


def reinforce_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """`G_t = r_t + gamma G_t'`. `t` is a generated token of a response, and `t'` its next generated token.

    The return of REINFORCE and REINFORCE++, arXiv 2501.03262. Detached.

    Args:
        rewards: `[B, T]`. A reward for the whole response is on its last generated token.
        mask: `[B, T]`, nonzero on generated tokens.
        gamma: Discount of a token.

    Returns:
        `[B, T]`, 0 where the mask is 0.
    """
    returns, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)
    return returns


def rewards_to_go(rewards: Tensor, returns: Tensor, turns: Tensor, most: int) -> Tensor:
    """`G_k = R - sum_{j < k} e_j`, the reward that a conversation gets from turn `k` on. Detached.

    `R` includes the rewards `e_j` of all turns. It may include more, such as a verifier's score, which is given at the
    end. After the last turn, `G_k` is that of the last turn.

    Args:
        rewards: `[B]`, of whole conversations.
        returns: `[B, K]`, the reward of each turn, 0 after a row's last turn.
        turns: `[B]`, number of turns of each conversation, 1 or more.
        most: Maximum number of turns of a conversation, `K` or more.

    Returns:
        `[B, most]`, in the dtype of the rewards.
    """
    earned = returns.detach().double().cumsum(dim=1)
    before = torch.cat([earned.new_zeros(len(earned), 1), earned], dim=1)  # of turn k what was given before it
    numbers = torch.arange(most, device=turns.device)
    own = torch.minimum(numbers, turns[:, None] - 1)  # [B, most]
    return (rewards.detach().double()[:, None] - before.gather(1, own)).to(float_dtype(rewards))


def subtree_rewards(rewards: Tensor, calls: Tensor, most: int) -> Tensor:
    """`N_k = 2 V_k - V_k-1`, if rows share turns: V_k is the mean reward of all rows that share turn k. Detached.

    `N_0` is `2 V_0`, and after a row's last turn V is the row's reward. Over a group, the mean of `N_k` is the mean
    reward V(root), and the mean of `N_0` is twice as much. So if these means are subtracted, without a division, the
    results are the advantages of TreeRL, arXiv 2506.11902, section 3.2:

        N_k - mean N_k = [V_k - V(root)] + [V_k - V_k-1]        where V_-1 is V(root)

    Args:
        rewards: `[B]`, of whole rows.
        calls: `[B, K]` int64, a number for each turn, equal if rows share the turn; below 0 after a row's last turn.
        most: Maximum number of turns of a row, `K` or more.

    Returns:
        `[B, most]`, in the dtype of the rewards.
    """
    raw = rewards.detach().double()[:, None]
    own = calls >= 0
    which, place = calls.unique(return_inverse=True)
    of_rows = raw.expand(len(raw), most)
    total = raw.new_zeros(len(which)).index_add(0, place.flatten(), of_rows[:, : own.shape[1]].flatten())
    mean = total / place.flatten().bincount(minlength=len(which))
    values = torch.cat([mean[place].where(own, raw), of_rows[:, own.shape[1] :]], dim=1)
    before = torch.cat([torch.zeros_like(raw), values[:, :-1]], dim=1)
    return (2 * values - before).to(float_dtype(rewards))


def at_turns(x: Tensor, turn: Tensor) -> Tensor:
    """For each token, the number of its turn. Tokens of no turn get the number of the first turn.

    Args:
        x: `[B, K]`, a number for each turn.
        turn: `[B, T]` int64, the turn of each token; below 0 if the policy did not write the token.

    Returns:
        `[B, T]`.
    """
    return x.gather(1, turn.clamp(min=0))


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None = None) -> Tensor:
    """`max((V - R)^2, (clip(V, V_old - clip_range, V_old + clip_range) - R)^2) / 2`; without a range `(V - R)^2 / 2`.

    The clip keeps the critic near its values at the start of the step. It is from PPO's first implementation, and is
    described in arXiv 2005.12729. `old_values` and `returns` are detached.

    Args:
        values: `[B, T]` of the critic in training.
        old_values: `[B, T]` of the critic at the start of the step.
        returns: `[B, T]`, the targets.
        clip_range: Largest change of a value from its old value before it is clipped; None is off.

    Returns:
        `[B, T]`.
    """
    targets = returns.detach()
    squares = (values - targets).square()
    if clip_range is not None:
        old = old_values.detach()
        clipped = values.clamp(old - clip_range, old + clip_range)
        squares = torch.maximum(squares, (clipped - targets).square())
    return squares / 2
