"""Rewards, returns and advantages along the tokens and turns of a response; and the critic's loss.

Returns and advantages are constants to the gradient: computed from detached inputs in float64, returned in the dtype of
the values, or of the rewards where there are none. Positions where the mask is 0 are stepped over, be they padding or,
between generated tokens, the output of a tool: what stands there (reward, value) has no part in the result, and no
discount is taken for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.functional.shapes import float_dtype


def last_token_rewards(scores: Tensor, mask: Tensor, penalty: Tensor | None = None) -> Tensor:
    """The score of each response as the reward of its last generated token, less a penalty of each token.

    Args:
        scores: `[B]`, one for each response.
        mask: `[B, T]`, nonzero on generated tokens; a row without one has no reward.
        penalty: `[B, T]`, such as a divergence from the reference (InstructGPT, arXiv 2203.02155, eq. 2); None is 0.

    Returns:
        `[B, T]`, detached, in the dtype of the scores.
    """
    generated = mask.bool()
    left = generated.flip(1).cumsum(1).flip(1)  # generated tokens from here to the end
    rewards = torch.where(generated & (left == 1), scores.detach().unsqueeze(1), 0.0).to(float_dtype(scores))
    return rewards if penalty is None else rewards - penalty.detach()


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


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, over the generated tokens `t` of each response and the next of them, `t'`:

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
        bootstrap: `[B]`, the value after the last token, for responses that were cut off; None is 0 for all.

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
    """`G_t = r_t + gamma G_t'`, over the generated tokens `t` of each response and the next of them, `t'`.

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


def subtree_rewards(rewards: Tensor, calls: Tensor, most: int) -> Tensor:
    """`N_k = 2 V_k - V_k-1`, where rows share turns: V_k is the mean reward of the rows that have turn k. Detached.

    `N_0` is `2 V_0`, and after a row's last turn V is its reward. Over a group, the mean of `N_k` is the mean reward,
    which is V(root), and that of `N_0` is twice as much. So compared in groups, without a division, they are the
    advantages of TreeRL, arXiv 2506.11902, section 3.2:

        N_k - mean N_k = [V_k - V(root)] + [V_k - V_k-1]        where V_-1 is V(root)

    Args:
        rewards: `[B]`, of whole rows.
        calls: `[B, K]` int64, a number of each turn, equal where rows share it; below 0 beyond a row's own turns.
        most: Turns that a row may have, `K` or more.

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
    """What each token's turn has, of `x` `[B, K]`; tokens of no turn get the first one's.

    Args:
        x: A number for each turn.
        turn: `[B, T]` int64, the turn of each token; below 0 where the policy did not write it.

    Returns:
        `[B, T]`.
    """
    return x.gather(1, turn.clamp(min=0))


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None = None) -> Tensor:
    """`max((V - R)^2, (clip(V, V_old - clip_range, V_old + clip_range) - R)^2) / 2`; without a range `(V - R)^2 / 2`.

    The clip keeps the critic near its values at the start of the step; it comes from PPO's first implementation and is
    described in arXiv 2005.12729. `old_values` and `returns` are detached.

    Args:
        values: `[B, T]` of the critic in training.
        old_values: `[B, T]` of the critic at the start of the step.
        returns: `[B, T]`, the targets.
        clip_range: How far a value may move from its old one and still count; None is off.

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
