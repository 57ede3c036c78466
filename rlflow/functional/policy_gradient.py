"""The loss of a policy gradient: PPO's loss, which contains GRPO's as a special case.

`pi` is the policy in training, `old` the policy at the start of the step, and `rollout` the policy of the engine when
it sampled. The loss is

    loss_t = w_t surrogate_t + kl.coef KL_t - entropy_coef H_t        policy_objective

    r_t = pi_t / old_t                                                log_ratio
    surrogate_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)     ppo_clip_loss
    w_t = min(old_t / rollout_t, high)                                importance_weights
    KL_t = r_t k3(pi_t, ref_t)                                        kl_estimate

and `aggregate` makes it one number. Gradients flow only through the logprobs and the entropy of `pi`: all other inputs
are detached, advantages included. Losses per token are not masked, since `aggregate` ignores values on padding. With
one update per step, `logprobs.detach()` serves as `old_logprobs`: the ratio is exactly 1, and the gradient is that of
REINFORCE.

The modes of `aggregate` for a loss `l` per token with mask `m`. `N` is the number of samples with at least one token,
and `S` is the number of all samples:

    token-mean                  sum_it m l / sum_it m               DAPO, arXiv 2503.14476
    sequence-mean-token-mean    sum_i (sum_t m l / sum_t m) / N     GRPO, arXiv 2402.03300
    sequence-mean-token-sum     sum_i sum_t m l / N
    constant                    sum_it m l / (max_length S)         Dr. GRPO, arXiv 2503.20783
    episode-mean                sum_e (sum_it m l / sum_it m) / E   i: the rows of episode e; E: episodes with a token

Every mode is a sum of weighted losses divided by a count, and both can be added up over parts of a batch. So the rows
of a batch may be divided over micro-batches and ranks in any way, and the gradient is that of the whole batch:

    aggregate(whole) = sum over parts of loss_sum(loss, loss_weights(mask, ...)) / sum over parts of loss_count(mask)

An agent, a game or a tree makes several rows in one episode. With `episode-mean` the loss does not depend on how the
tokens of an episode are divided into rows. For this, each row has the number of tokens of its whole episode
(`Episodes`). If each row is an episode, the mode is `sequence-mean-token-mean`.

Rows without a token, such as responses that `mask_truncated` leaves out, count only in `constant`, whose divisor does
not depend on what was sampled. A loss may also be per sample, `[B]`, with a mask `[B]` of the samples that count
(`loss_mask.any(dim=1)`). It is then averaged over these samples. Only `episode-mean` first averages it over the samples
of each episode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.functional.shapes import broadcast_to_tokens, token_mean, token_sum

Aggregation = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant", "episode-mean"]
ImportanceLevel = Literal["token", "sequence", "geometric"]
ImportanceMode = Literal["truncate", "mask"]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k3+", "k3-ratio"]
MOST = 1e9  # of the weight of the divergence
MAX_LOG_RATIO = 20.0  # as in verl and OpenRLHF; exp(20) is 4.9e8


def policy_objective(
    surrogate: Tensor,
    logprobs: Tensor,
    entropy: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    mask: Tensor,
    log: Callable[[str, Tensor, Tensor], None],
    importance: Importance | None,
    kl: KL,
    entropy_coef: float = 0.0,
) -> Tensor:
    """`w_t surrogate_t + kl.coef KL_t - entropy_coef H_t`; w are the importance weights of old over rollout.

    Args:
        surrogate: `[B, T]`, or `[B]` for whole sequences: each token of a sequence then has the sequence's surrogate.
        logprobs: `[B, T]` of the policy.
        entropy: `[B, T]` of the policy.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        rollout_logprobs: `[B, T]` of the engine when it sampled.
        ref_logprobs: `[B, T]` of the reference; None if there is no reference.
        mask: `[B, T]`, True on tokens that count.
        log: Function that logs `actor/entropy`, `actor/kl` and `actor/importance_dropped`, each with the mask.
        importance: Correction for the difference between old and rollout; None is off.
        kl: Weight and estimator of the divergence from the reference; only logged if it is taken off the rewards.
        entropy_coef: Weight of the entropy bonus.

    Returns:
        `[B, T]`.
    """
    loss = surrogate[:, None].expand_as(entropy) if surrogate.dim() == 1 else surrogate
    if importance is not None:
        loss = loss * importance_weights(old_logprobs, rollout_logprobs, mask, importance)
        log("actor/importance_dropped", importance_dropped(old_logprobs, rollout_logprobs, mask, importance), mask)
    log("actor/entropy", entropy.detach(), mask)
    if entropy_coef != 0:
        loss = loss - entropy_coef * entropy
    if ref_logprobs is None:
        return loss
    divergence = kl.estimate(logprobs, ref_logprobs, old_logprobs)
    log("actor/kl", divergence.detach(), mask)
    return loss if kl.in_reward or kl.coef == 0 else loss + kl.coef * divergence


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """`log pi - log old` of each token, clamped to the range from -20 to 20; `old_logprobs` is detached.

    Outside this range the gradient is 0. Without the clamp, `exp` overflows at 89 in float32, and infinity times a
    gradient of 0 is NaN.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the other policy, for the same tokens.

    Returns:
        `[B, T]`.
    """
    return bounded(logprobs - old_logprobs.detach())


def bounded(log_ratios: Tensor) -> Tensor:
    """Log ratios of any shape, such as sums over a response, clamped to -20 and 20."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class Bounds:
    """Range to which a ratio is clipped, around its middle: 1 for a ratio, 0 for a log ratio.

    Attributes:
        low: Distance of the range's lower end from its middle (1 for a ratio, 0 for a log ratio).
        high: Distance of the range's upper end from its middle.
    """

    low: float = 0.2
    high: float = 0.2

    def __post_init__(self) -> None:
        if not (self.low >= 0 and self.high >= 0):
            raise UserError(f"`clip.low` is {self.low} and `clip.high` is {self.high}; give both 0 or more")


@dataclass(frozen=True)
class Clip(Bounds):
    """The clip of PPO, arXiv 1707.06347, for the ratio of the policy to the old policy.

    Attributes:
        dual: Ratio, above 1, beyond which a token with a negative advantage has no gradient (arXiv 1912.09729); None is
            off.
    """

    dual: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual is not None and not self.dual > 1:
            raise UserError(
                f"`clip.dual` is {self.dual}, and it bounds ratios above 1; give more than 1 (3 in the paper), or null"
                " for no dual clip"
            )


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`; with dual clip, it is at most `-dual_clip A` where `A < 0`.

    PPO, arXiv 1707.06347, equation 7. A `clip_high` above `clip_low` is the clip-higher of DAPO, arXiv 2503.14476.
    Dual clip is from arXiv 1912.09729.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        advantages: `[B, T]`, or `[B, 1]` or `[B]` for one per sample.
        clip_low: Distance below 1 at which the ratio is clipped.
        clip_high: Distance above 1 at which the ratio is clipped.
        dual_clip: The ratio, above 1, beyond which a token with a negative advantage has no gradient (3 in the paper);
            None is off.

    Returns:
        `[B, T]`.
    """
    ratio, advantages = _ratio_and_advantages(logprobs, old_logprobs, advantages)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return -objective


def ppo_is_clipped(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """1 at tokens that have no gradient because of a clip of `ppo_clip_loss`, else 0. The mean is the clip fraction.

    Args:
        logprobs: `[B, T]` of the policy in training.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        advantages: `[B, T]`, or `[B, 1]` or `[B]` for one per sample.
        clip_low: Distance below 1 at which the ratio is clipped.
        clip_high: Distance above 1 at which the ratio is clipped.
        dual_clip: The ratio beyond which a token with a negative advantage has no gradient; None is off.

    Returns:
        `[B, T]`, detached, in the dtype of `logprobs`.
    """
    ratio, advantages = _ratio_and_advantages(logprobs.detach(), old_logprobs, advantages)
    above = (advantages > 0) & (ratio > 1 + clip_high)
    below = (advantages < 0) & (ratio < 1 - clip_low)
    clipped = above | below
    if dual_clip is not None:
        clipped = clipped | ((advantages < 0) & (ratio > dual_clip))
    return clipped.to(logprobs.dtype)


def _ratio_and_advantages(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    ratio = log_ratio(logprobs, old_logprobs).exp()
    return ratio, broadcast_to_tokens(advantages.detach(), ratio)


@dataclass(frozen=True)
class Importance:
    """Correction for the difference between the logprobs of the engine, which sampled, and those of the trainer.

    Attributes:
        level: Tokens over which the ratio is taken: each `token`, the whole `sequence`, or the `geometric` mean of the
            sequence.
        mode: `truncate` cuts weights at `high`; `mask` drops tokens whose weight is not between `low` and `high`.
        low: The smallest weight that `mask` keeps; `truncate` has no lower limit.
        high: The largest weight; `inf` for no upper limit.
    """

    level: ImportanceLevel = "token"
    mode: ImportanceMode = "truncate"
    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        levels, modes = get_args(ImportanceLevel), get_args(ImportanceMode)
        if self.level not in levels:
            raise UserError(f"importance level {self.level!r} does not exist; choose one of {', '.join(levels)}")
        if self.mode not in modes:
            raise UserError(f"importance mode {self.mode!r} does not exist; choose one of {', '.join(modes)}")
        if not self.low >= 0:
            raise UserError(f"importance `low` is {self.low}, and weights are ratios of probabilities; give 0 or more")
        if self.low > self.high:
            raise UserError(
                f"importance weights between `low` {self.low} and `high` {self.high} do not exist; lower `low`"
            )


def importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, settings: Importance = Importance()
) -> Tensor:
    """Weights by which a loss on sampled tokens is multiplied; with `d_t = log old_t - log rollout_t`:

        token        w_t = exp(d_t)
        sequence     w_t = exp(sum_s d_s)       its noise grows with the length; prefer the other two
        geometric    w_t = exp(mean_s d_s)

        truncate     min(w, high)               truncated importance sampling, arXiv 1802.01561
        mask         w where low <= w <= high, else 0    IcePop, arXiv 2510.18855

    `old` is the trainer's policy at the start of the step. The loss has the ratio of the policy in training to `old`
    (decoupled PPO, arXiv 2110.00641). If a loss has the ratio to `rollout` instead, do not use these weights. A token
    that is masked still counts in the loss's denominator. Detached.

    Args:
        old_logprobs: `[B, T]`, of the trainer at the start of the step.
        rollout_logprobs: `[B, T]`, of the engine when it sampled.
        mask: `[B, T]`, nonzero on sampled tokens.
        settings: Level of the ratio, and limits of the weights.

    Returns:
        `[B, T]` at every level, 0 where the mask is 0.
    """
    d = log_ratio(old_logprobs.detach(), rollout_logprobs)
    if settings.level == "sequence":
        d = token_sum(d, mask).unsqueeze(1).expand_as(d)
    elif settings.level == "geometric":
        d = token_mean(d, mask).unsqueeze(1).expand_as(d)
    weights = bounded(d).exp()
    if settings.mode == "truncate":
        weights = weights.clamp(max=settings.high)
    else:
        weights = torch.where((settings.low <= weights) & (weights <= settings.high), weights, 0.0)
    return weights.where(mask.bool(), 0.0)


def importance_dropped(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, settings: Importance = Importance()
) -> Tensor:
    """1 at tokens whose weight `importance_weights` cut or set to 0, else 0. The mean is the dropped fraction.

    Watch it at the level `sequence`, where even noise makes it grow with the length. The arguments are those of
    `importance_weights`.

    Returns:
        `[B, T]` in the dtype of `old_logprobs`, 0 where the mask is 0.
    """
    uncut = replace(settings, mode="truncate", high=torch.inf)
    every = importance_weights(old_logprobs, rollout_logprobs, mask, uncut)
    outside = every > settings.high
    if settings.mode == "mask":
        outside = outside | (every < settings.low)
    return (outside & mask.bool()).to(old_logprobs.dtype)


def expected_logprobs(logprobs: Tensor, sampler_logprobs: Tensor, importance: Importance | None) -> Tensor:
    """`sum_v sg(q_v w_v) log p_v` over the tokens v that could be sampled at a place: the mean under the sampler.

    Its gradient is the expectation of that of `w log p` where q samples, which is not 0 where q is not p: score
    centering (arXiv 2609.20807, equations 3 and 7) takes it off. With the weights w = p / q, uncut, it is 0.

    Args:
        logprobs: `[B, T, K]` of the policy, log p.
        sampler_logprobs: `[B, T, K]` of the engine, log q; `-inf` at places without a token.
        importance: The weights w of a token, from p over q; None for 1.

    Returns:
        `[B, T]`.
    """
    there = sampler_logprobs > -torch.inf
    weights = sampler_logprobs.exp()
    if importance is not None:
        weights = weights * importance_weights(logprobs, sampler_logprobs, there, importance)
    return (weights * logprobs).where(there, 0.0).sum(-1)


@dataclass(frozen=True)
class KL:
    """Term by which the divergence from a reference restrains a policy.

    Attributes:
        coef: Weight of the divergence. With 0 no reference is loaded.
        kind: Estimator of the divergence. None for the algorithm's own, or for k1 in a reward and k3-ratio in a loss,
            which have the gradient of KL (arXiv 2512.21852).
        in_reward: Take the divergence off the rewards instead of adding it to the loss; None for the algorithm's way.
        target: Adapt `coef` to hold the divergence per token at this value (arXiv 1909.08593). It must be in the
            reward. None is off.
        horizon: Number of samples over which `coef` adapts.
    """

    coef: float = 0.0
    kind: KLEstimator | None = None
    in_reward: bool | None = None
    target: float | None = None
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        if not 0 <= self.coef <= MOST:
            raise UserError(f"`kl.coef` is {self.coef}; give 0 or more, at most {MOST:g}")
        if self.kind not in (None, *get_args(KLEstimator)):
            raise UserError(f"`kl.kind` is {self.kind!r}; give one of {', '.join(get_args(KLEstimator))}")
        if self.coef > 0 and self.in_reward is True and self.kind == "k3-ratio":
            raise UserError(
                "`kl.kind` is 'k3-ratio' and `kl.in_reward` is true, but its ratio is for the gradient of a loss; set"
                " `kl.kind` to 'k1', whose gradient in a reward is that of KL"
            )
        if self.coef > 0 and self.in_reward is False and self.kind == "k1":
            raise UserError(
                "`kl.kind` is 'k1' and `kl.in_reward` is false, but the expected gradient of k1 in a loss is 0; set"
                " `kl.kind` to 'k3-ratio', or `kl.in_reward` to true"
            )
        if self.target is not None and self.in_reward is False:
            raise UserError(f"`kl.target` is {self.target}, and adapts KL in the reward; set `kl.in_reward` to true")
        if self.target is not None and not (self.target > 0 and self.coef > 0):
            raise UserError(
                f"`kl.target` is {self.target} and `kl.coef` is {self.coef}, which is adapted by multiplication; give"
                " both more than 0"
            )
        if not self.horizon > 0:
            raise UserError(
                f"`kl.horizon` is {self.horizon}, and `kl.coef` is adapted over that number of samples; give more"
                " than 0"
            )

    def filled(self, in_reward: bool, in_loss: KLEstimator) -> KL:
        """A copy in which an algorithm's defaults replace fields that are None.

        Args:
            in_reward: Whether the algorithm has the divergence in the reward.
            in_loss: The algorithm's estimator in a loss.
        """
        there = in_reward if self.in_reward is None else self.in_reward
        return replace(self, in_reward=there, kind=self.kind or ("k1" if there else in_loss))

    @property
    def restrains_reward(self) -> bool:
        """Whether the divergence is taken off the rewards."""
        return bool(self.in_reward) and self.coef > 0

    def estimate(self, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None) -> Tensor:
        """`kl_estimate` of this kind."""
        kind = self.filled(in_reward=False, in_loss="k3-ratio").kind
        assert kind is not None
        return kl_estimate(logprobs, ref_logprobs, kind, old_logprobs)


def kl_estimate(
    logprobs: Tensor, ref_logprobs: Tensor, kind: KLEstimator = "k3-ratio", old_logprobs: Tensor | None = None
) -> Tensor:
    """An estimate of `KL(pi || ref)` at each token; with `d = log pi - log ref` of the token, sampled from `pi`:

        k1          d                   unbiased value; as a loss its expected gradient is 0
        k2          d^2 / 2             biased value; as a loss its expected gradient is that of KL(pi || ref)
        k3          exp(-d) - 1 + d     unbiased value, never negative; as a loss, gradient of KL(ref || pi)
        abs         |d|
        k3+         the value of k3 with the gradient of k2 (straight-through)
        k3-ratio    (pi / old) k3       value and gradient of KL(pi || ref) where `old` sampled the token

    In the first update of a step, k2, k3+ and k3-ratio have the same gradient. After this update, `pi` is no longer the
    policy that sampled the tokens, which is `old`. Then only k3-ratio has the right gradient, `(pi / old) d grad log
    pi` of each token. So use k3-ratio in a loss, and k1, detached, in a reward (arXiv 2512.21852).

    The estimators are John Schulman's, http://joschu.net/blog/kl-approx.html. k3 is in equation 4 of GRPO, arXiv
    2402.03300, and k3-ratio is from DeepSeek-V3.2, arXiv 2512.02556. `ref_logprobs` and `old_logprobs` are detached;
    the result is differentiable in `logprobs`. The log ratios of k3, k3+ and k3-ratio are clamped, see `log_ratio`.

    Args:
        logprobs: `[B, T]` of the policy.
        ref_logprobs: `[B, T]` of the reference, for the same tokens.
        kind: The estimator.
        old_logprobs: `[B, T]` of the policy that sampled, which k3-ratio reads; None if `pi` itself sampled.

    Returns:
        `[B, T]`.

    Raises:
        UserError: The estimator does not exist.
    """
    d = logprobs - ref_logprobs.detach()
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return _k3(logprobs, ref_logprobs)
    if kind == "abs":
        return d.abs()
    if kind == "k3+":
        k2 = d.square() / 2
        return _k3(logprobs, ref_logprobs).detach() + (k2 - k2.detach())
    if kind == "k3-ratio":
        old = logprobs if old_logprobs is None else old_logprobs
        return log_ratio(logprobs, old).exp() * _k3(logprobs, ref_logprobs)
    raise UserError(f"KL estimator {kind!r} does not exist; choose one of {', '.join(get_args(KLEstimator))}")


def _k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    d = log_ratio(logprobs, ref_logprobs)
    return (-d).expm1() + d  # exp(-d) - 1 would lose all digits of a small d


@dataclass(frozen=True)
class Episodes:
    """The episode of each row of a batch, for `episode-mean`.

    Rows 0 and 1 are one episode, with 3 and 1 tokens that count. Row 2 is another episode, with 2 tokens:

        tokens    4       4        2
        first     True    False    True

    Attributes:
        tokens: `[B]` int64, number of tokens that count in all rows of the row's episode.
        first: `[B]` bool, whether the row is the first of its episode that has such a token. It counts the episode.
    """

    tokens: Tensor
    first: Tensor

    @classmethod
    def of(cls, tokens: Tensor, episode: Tensor) -> Episodes:
        """The episodes of a whole batch.

        Args:
            tokens: `[B]` int64, number of tokens that count in each row.
            episode: `[B]` int64, the number of each row's episode, from 0.
        """
        numbers = int(episode.max()) + 1 if len(episode) else 0
        whole = tokens.new_zeros(numbers).index_add(0, episode, tokens)
        rows = torch.arange(len(tokens), device=tokens.device)
        counted = rows.where(tokens > 0, len(tokens))
        first = rows.new_full((numbers,), len(tokens)).scatter_reduce(0, episode, counted, "amin")
        return cls(whole[episode], first[episode] == rows)

    def take(self, rows: Tensor) -> Episodes:
        """The episodes of the rows at `rows`, `[K]`."""
        return Episodes(self.tokens[rows], self.first[rows])


def aggregate(
    loss: Tensor, mask: Tensor, mode: Aggregation, max_length: int | None = None, episode: Tensor | None = None
) -> Tensor:
    """The loss of a whole batch as one number, differentiable in `loss`.

    Args:
        loss: `[B, T]` per token, or `[B]` per sample.
        mask: `[B, T]`, nonzero on tokens that count; or `[B]` for a loss per sample.
        mode: One of the modes of this module's docstring.
        max_length: The divisor of `constant`: a setting, not the padded width. No other mode reads it.
        episode: `[B]` int64 from 0, equal for the rows of one episode, which `episode-mean` reads; None if each row is
            an episode.

    Returns:
        0-dim, in the dtype of `loss`; 0 if nothing counts.

    Raises:
        UserError: The mode does not exist, or is `constant` without a positive `max_length`.
    """
    if loss.dim() == 1 and mask.dim() == 2:
        mask = mask.any(dim=1)
    episodes = None if episode is None else Episodes.of(tokens_of(mask), episode)
    weights = loss_weights(mask, mode, max_length, episodes)
    return loss_sum(loss, weights) / loss_count(mask, mode, episodes).clamp(min=1)


def tokens_of(mask: Tensor) -> Tensor:
    """`[B]` int64, the number of nonzero entries in each row of a mask `[B, T]` or `[B]`."""
    return mask.bool().sum(dim=1) if mask.dim() == 2 else mask.bool().long()


def loss_weights(
    mask: Tensor, mode: Aggregation, max_length: int | None = None, episodes: Episodes | None = None
) -> Tensor:
    """Weights by which the entries of a loss are multiplied before the sum. They depend on the row and its episode.

    Args:
        mask: `[B, T]` for a loss per token, or `[B]` for a loss per sample; nonzero on entries that count.
        mode: See `aggregate`.
        max_length: See `aggregate`.
        episodes: The episodes of these rows; None if each row is an episode.

    Returns:
        Weights in the shape of `mask`, float64, so that a float64 loss loses no precision; 0 where the mask is 0.

    Raises:
        UserError: The mode does not exist, or is `constant` without a positive `max_length`.
    """
    _check_mode(mode)
    if mode == "constant" and (max_length is None or max_length < 1):
        raise UserError(
            f"`max_length` is {max_length}; the loss aggregation `constant` divides by it. "
            "Set it to the longest response that is allowed"
        )
    weights = mask.bool().double()
    if mode == "episode-mean" and episodes is not None:
        tokens = episodes.tokens.clamp(min=1).to(weights.device, non_blocking=True)
        return weights / (tokens[:, None] if weights.dim() == 2 else tokens)
    if weights.dim() == 1:
        return weights
    if mode in ("sequence-mean-token-mean", "episode-mean"):
        return weights / weights.sum(dim=1, keepdim=True).clamp(min=1)
    if mode == "constant":
        assert max_length is not None
        return weights / max_length
    return weights


def loss_sum(loss: Tensor, weights: Tensor) -> Tensor:
    """`sum w l`, 0-dim, summed in float64 and returned in the dtype of `loss`. A NaN where `w` is 0 is ignored.

    Args:
        loss: `[B, T]` or `[B]`.
        weights: Weights from `loss_weights`, in the shape of `loss`.
    """
    assert loss.shape == weights.shape, f"a loss of shape {list(loss.shape)} and weights {list(weights.shape)}"
    return (loss.where(weights > 0, 0.0) * weights).sum().to(loss.dtype)


def loss_count(mask: Tensor, mode: Aggregation, episodes: Episodes | None = None) -> Tensor:
    """The number by which the sum of weighted losses is divided.

    It is the number of tokens for `token-mean`, of all samples for `constant`, of episodes with a token for
    `episode-mean`, and of samples with a token for the other modes.

    Args:
        mask: `[B, T]` for a loss per token, or `[B]` for a loss per sample; nonzero on entries that count.
        mode: See `aggregate`.
        episodes: The episodes of these rows; None if each row is an episode.

    Returns:
        0-dim int64; add up the counts of all parts before dividing.

    Raises:
        UserError: The mode does not exist.
    """
    _check_mode(mode)
    if mode == "episode-mean" and episodes is not None:
        return episodes.first.sum()
    counts = mask.bool()
    if counts.dim() == 2 and mode == "constant":
        return counts.new_tensor(len(counts), dtype=torch.int64)
    return counts.sum() if counts.dim() == 1 or mode == "token-mean" else counts.any(dim=1).sum()


def _check_mode(mode: str) -> None:
    if mode not in get_args(Aggregation):
        raise UserError(f"loss aggregation {mode!r} does not exist; choose one of {', '.join(get_args(Aggregation))}")
