"""Proximal Policy Optimization: arXiv 1707.06347; with a critic and KL per token: InstructGPT, arXiv 2203.02155."""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

from rlflow import PerSample, PerToken, UserError, ValueModel, node
from rlflow.functional import gae, last_token_rewards, reinforce_returns, value_loss
from rlflow.types import Tokens, TokensWithLossMask, WithLossMask, WithTexts

from .policy_gradient import Clipped, Scored

OnTruncation = Literal["terminal", "bootstrap", "mask"]


class WithFinished(WithLossMask, Protocol):
    """The fields of a rollout that the estimates read: which tokens count, and which responses were not cut."""

    finished: PerSample  # [B] bool


@dataclass(frozen=True)
class Estimates:
    """Results of GAE for rewards and values.

    Attributes:
        advantages: `[B, T]`, with `lam`, for the actor; not yet whitened.
        returns: `[B, T]`, with `critic_lam`, the critic's targets.
    """

    advantages: PerToken
    returns: PerToken


class Targets(Protocol):
    """The field of the estimates that the critic's loss reads."""

    returns: PerToken


@dataclass(eq=False)
class PPO(Clipped, Scored):
    """PPO with a critic: advantages of each token by GAE, KL in the reward, and both losses clipped.

        r_t     = r 1[t is last] - kl.coef k1_t
        delta_t = r_t + gamma V_t+1 - V_t,    A_t = delta_t + gamma lam A_t+1        A is then whitened over the step
        R_t     = V_t + A_t, with critic_lam in place of lam                         the critic's targets
        surrogate_t   = -min(ratio_t A_t, clip(ratio_t, 1 - clip.low, 1 + clip.high) A_t)
        critic loss_t = max((v_t - R_t)^2, (clip(v_t, V_t - value_clip, V_t + value_clip) - R_t)^2) / 2

    V is the critic at the start of the step, v the critic in training, t+1 the next token that the policy wrote. With a
    lambda of 1 a reward at the end reaches every token whole; with less, lambda^(T - 1) of it reaches the first of T
    tokens: 2e-6 of it with 0.95 and 256 tokens. `actor.start_step` lets the critic train alone first.

    Args:
        critic: The value model, from a checkpoint with a value head or without. Its losses per token become one number
            by `token-mean` unless it says otherwise, whatever the actor's do. None for one of the actor's model, epochs
            and samples per update, which count rows here even if the actor's count episodes.
        gamma: Discount of a token.
        lam: Decay of the sum over temporal differences in the actor's advantages.
        critic_lam: Decay of the critic's targets, as `lam` for advantages.
        value_clip: Largest change of a value from its old value before it is clipped; None is off.
        on_truncation: Treatment of a response that was cut: as one that has ended (`terminal`); with the critic's value
            after its last token (`bootstrap`); or leave it out of both losses (`mask`).
    """

    critic: ValueModel | str | None = None
    gamma: float = 1.0
    lam: float = 1.0
    critic_lam: float = 1.0
    value_clip: float | None = 0.5
    on_truncation: OnTruncation = "terminal"

    kl_in_reward: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("gamma", "lam", "critic_lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"`{name}` is {getattr(self, name)}; give a number from 0 to 1")
        if self.value_clip is not None and not self.value_clip > 0:
            raise UserError(f"`value_clip` is {self.value_clip}; give more than 0, or null for none")
        if self.on_truncation == "bootstrap" and self.mask_truncated:
            raise UserError(
                "`on_truncation` is 'bootstrap' and `mask_truncated` is true, which leaves the same responses out; drop"
                " one of them"
            )
        super().__post_init__()
        self.mask_truncated |= self.on_truncation == "mask"
        if self.on_truncation != "bootstrap":
            self.final_values = None

    def configure_models(self) -> None:
        super().configure_models()
        if self.critic is None:
            self.critic = ValueModel(
                self.actor.model,
                epochs=self.actor.epochs,
                samples_per_update=self.actor.samples_per_update,
                gradient_checkpointing=self.actor.gradient_checkpointing,
                freeze_vision_tower=self.actor.freeze_vision_tower,
                trust_remote_code=self.actor.trust_remote_code,
            )
        if self.critic.loss_aggregation is None:
            self.critic.loss_aggregation = "token-mean"

    @node
    def rewards(self, rollout: WithTexts, model_scores: PerSample | None = None) -> PerSample:
        return self.outcome(rollout, model_scores)

    @node(role="critic")
    def values(self, rollout: Tokens) -> PerToken:
        return self.critic.values(rollout)

    @node(role="critic")
    def final_values(self, rollout: Tokens) -> PerSample:
        return self.critic.final_values(rollout)

    @node
    def estimates(
        self,
        rollout: WithFinished,
        rewards: PerSample,
        values: PerToken,
        kl_penalty: PerToken | None = None,
        final_values: PerSample | None = None,
    ) -> Estimates:
        mask = rollout.loss_mask
        r = last_token_rewards(rewards, mask, kl_penalty)
        bootstrap = None if final_values is None else torch.where(rollout.finished, 0.0, final_values)
        advantages, _ = gae(r, values, mask, self.gamma, self.lam, bootstrap)
        _, returns = gae(r, values, mask, self.gamma, self.critic_lam, bootstrap)
        earned = reinforce_returns(r, mask, self.gamma)  # has no value in it, as `returns` has below 1
        ended = mask if bootstrap is None else mask & rollout.finished[:, None]  # what the others earn is not known
        error, spread = (self.mean((x - self.mean(x, ended)) ** 2, ended) for x in (earned - values, earned))
        self.log("critic/explained_variance", torch.where(spread > 0, 1 - error / spread, 0.0), batch_size=1)
        return Estimates(advantages, returns)

    @node
    def advantages(self, rollout: WithLossMask, estimates: Estimates) -> PerToken:
        return self.whiten(estimates.advantages, rollout.loss_mask)

    @node(role="critic", type="train")
    def critic_loss(self, rollout: TokensWithLossMask, values: PerToken, estimates: Targets) -> PerToken:
        v = self.critic.values(rollout)
        self.log("critic/value", v.detach(), rollout.loss_mask)
        if self.value_clip is not None:
            moved = (v.detach() - values).abs() > self.value_clip
            self.log("critic/clip_fraction", moved.to(v.dtype), rollout.loss_mask)
        return value_loss(v, values, estimates.returns, self.value_clip)
