"""Losses of train nodes as plain functions, for a config to name."""

from __future__ import annotations

from functools import partial

from rlflow.functional import Importance, KLEstimator, kl_estimate, policy_objective, ppo_clip_loss, ppo_is_clipped
from rlflow.models.causal_lm import CausalLM
from rlflow.module import RLModule
from rlflow.values.cuts import PerSample, PerToken
from rlflow.values.protocols import Sampled


def policy_loss(
    self: RLModule,
    actor: CausalLM,
    rollout: Sampled,
    advantages: PerSample | PerToken,
    old_logprobs: PerToken | None = None,
    ref_logprobs: PerToken | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    importance: Importance | None = Importance(),
    kl_coef: float = 0.0,
    kl_kind: KLEstimator = "k3-ratio",
    entropy_coef: float = 0.0,
) -> PerToken:
    """`w_t surrogate_t + kl_coef KL_t - entropy_coef H_t`, the loss of `rlflow.algorithms.PolicyGradient`, `[B, T]`.

    Args:
        self: The module, which logs.
        actor: The model that is trained.
        rollout: Its samples.
        advantages: `[B]`, or `[B, T]`.
        old_logprobs: `[B, T]` of the policy at the start of the step; where None, the trained one is the old one, which
            holds for one update a step.
        ref_logprobs: `[B, T]` of the reference; None is no KL.
        clip_low: How far the ratio may fall below 1 and still count.
        clip_high: How far the ratio may rise above 1 and still count.
        dual_clip: Ratio, above 1, from which a negative advantage no longer counts (arXiv 1912.09729); None is off.
        importance: Correction for the gap between rollout and training logprobs; None is off.
        kl_coef: Weight of the KL divergence from the reference.
        kl_kind: Its estimator; k3-ratio has the gradient of KL, see `rlflow.functional.kl_estimate`.
        entropy_coef: Weight of the entropy bonus.
    """
    mask, sampled, clips = rollout.loss_mask, rollout.logprobs, (clip_low, clip_high, dual_clip)
    logprobs, entropy = actor.score(rollout)
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    self.log("actor/clip_fraction", ppo_is_clipped(logprobs, old, advantages, *clips), mask)
    loss = ppo_clip_loss(logprobs, old, advantages, *clips)
    kl = None if ref_logprobs is None else partial(kl_estimate, logprobs, ref_logprobs, kl_kind, old)
    return policy_objective(loss, entropy, old, sampled, mask, self.log, importance, entropy_coef, kl, kl_coef)
