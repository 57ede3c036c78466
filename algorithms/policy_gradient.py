"""The policy gradient, Williams 1992, as language models are trained with it: InstructGPT, arXiv 2203.02155."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from rlflow import CausalLM, PerSample, PerToken, node
from rlflow.functional import (
    KL,
    Aggregation,
    Clip,
    Importance,
    KLEstimator,
    at_turns,
    policy_objective,
    ppo_clip_loss,
    ppo_is_clipped,
)
from rlflow.state import AdaptiveCoefficient
from rlflow.types import Sampled, Tokens, Written

from .checks import check, check_updates
from .credit import Credited
from .scored import SampledLogprobs

Anchor = Literal["old", "rollout"]


@dataclass(eq=False)
class PolicyGradient(Credited):
    """What the algorithms that sample share. A subclass adds the node `advantages`, and its `surrogate` if not PPO's.

        loss_t = w_t surrogate_t + kl.coef KL_t - entropy_coef H_t,    w = importance weights of old over rollout

    Args:
        clip: How far the ratio may leave 1 and still count.
        anchor: Whose logprobs stand below the ratio: the trainer's at the start of the step (`old`), or the engine's
            when it sampled (`rollout`), with no pass for old ones and no importance weight, which would correct twice.
        kl: How the divergence from the reference restrains the policy, in the loss or in the reward.
        reference: Where the divergence is measured from; None for the actor as it was, without adapters under LoRA.
        entropy_coef: Weight of the entropy bonus.
        importance: Correction for the gap between rollout and training logprobs; None is off.
        loss_aggregation: How per-token losses become one number.
    """

    clip: Clip = Clip()
    anchor: Anchor = "old"
    kl: KL = KL()
    reference: CausalLM | None = None
    entropy_coef: float = 0.0
    importance: Importance | None = Importance()
    loss_aggregation: Aggregation = "token-mean"

    compares_group: ClassVar[bool] = False  # whether advantages are relative to other samples of the prompt
    one_update: ClassVar[bool] = False  # whether the gradient is right for the policy that sampled alone
    kl_in_reward: ClassVar[bool] = False  # where the divergence stands, if `kl` does not say
    kl_in_loss: ClassVar[KLEstimator] = "k3-ratio"  # its estimator there, if `kl` does not say
    unused: ClassVar[tuple[str, ...]] = ()  # settings that the algorithm has no use for

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self)
        self.kl = self.kl.filled(self.kl_in_reward, self.kl_in_loss)
        self.kl_coefficient = AdaptiveCoefficient(self.kl.coef, self.kl.target, self.kl.horizon)
        if self.kl.coef == 0:
            self.ref_logprobs = None
        if not self.kl.restrains_reward:
            self.kl_penalty = None

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether a node scores the samples before the first update of a step."""
        if self.anchor == "rollout":
            return False
        lora = self.actor.lora
        draws_dropout = lora is not None and lora.dropout > 0  # so training scores are not the policy's own
        return self.actor.several_updates or self.kl.restrains_reward or draws_dropout

    @property
    def ignores_sampler(self) -> bool:
        """With `anchor: old` a clip is around the policy at the start of the step; importance knows who sampled."""
        return self.importance is None if self.anchor == "old" else self.unclipped

    def configure_models(self) -> None:
        check_updates(self)
        vars(self).pop("old_logprobs", None)
        if not self.needs_old_logprobs:
            self.old_logprobs = None  # one update a step: the policy that is trained is the old one
        super().configure_models()
        if self.reference is None:
            self.reference = self.actor.initial()
        else:
            self.reference.only_scores(like=self.actor)

    @node
    def rewards(
        self, rollout: Written, model_scores: PerSample | None = None, kl_penalty: PerToken | None = None
    ) -> PerSample:
        rewards = self.outcome(rollout, model_scores)
        return self.credited(rollout, rewards if kl_penalty is None else rewards - kl_penalty.sum(dim=1))

    @node(role="reference")
    def ref_logprobs(self, rollout: Tokens) -> PerToken:
        return self.reference.logprobs(rollout)

    @node(role="actor")
    def old_logprobs(self, rollout: Tokens) -> PerToken:
        return self.actor.logprobs(rollout)

    @node
    def kl_penalty(
        self, rollout: SampledLogprobs, ref_logprobs: PerToken, old_logprobs: PerToken | None = None
    ) -> PerToken:
        sampled = rollout.logprobs if old_logprobs is None else old_logprobs
        kl = self.kl.estimate(sampled, ref_logprobs).where(rollout.turn >= 0, 0.0)  # not of what an environment wrote
        coefficient, mask = self.kl_coefficient.value, rollout.loss_mask
        self.kl_coefficient.update(float(self.mean(kl, mask)), rows=len(self.all_rows(rollout.lengths)))
        self.log("actor/kl_coef", kl.new_tensor(coefficient))
        return coefficient * kl

    @node(role="actor", type="train")
    def actor_loss(
        self,
        rollout: Sampled,
        advantages: PerSample | PerToken,
        old_logprobs: PerToken | None = None,
        ref_logprobs: PerToken | None = None,
        turn: PerToken | None = None,
    ) -> PerToken:
        mask, sampled = rollout.loss_mask, rollout.logprobs
        logprobs, entropy = self.actor.score(rollout)
        old = self.anchored(rollout, logprobs, old_logprobs)
        loss = self.surrogate(logprobs, old, advantages if turn is None else at_turns(advantages, turn), mask)
        kl = None if ref_logprobs is None else partial(self.divergence, logprobs, ref_logprobs, old, mask)
        weights = self.importance, self.entropy_coef, kl, 0.0 if self.kl.in_reward else self.kl.coef
        return policy_objective(loss, entropy, old, sampled, mask, self.log, *weights)

    def anchored(self, rollout: Sampled, logprobs: PerToken, old_logprobs: PerToken | None) -> PerToken:
        """The logprobs below the ratio, `[B, T]` without gradient, as `anchor` says."""
        if self.anchor == "rollout":
            return rollout.logprobs
        return logprobs.detach() if old_logprobs is None else old_logprobs  # one update a step: old is the trained one

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: PerToken) -> PerToken:
        """The loss whose gradient is the policy gradient, `[B, T]`, or `[B]` of whole sequences."""
        clips = self.clip.low, self.clip.high, self.clip.dual
        self.log("actor/clip_fraction", ppo_is_clipped(logprobs, old_logprobs, advantages, *clips), mask)
        return ppo_clip_loss(logprobs, old_logprobs, advantages, *clips)

    def divergence(self, logprobs: PerToken, ref_logprobs: PerToken, old_logprobs: PerToken, _: PerToken) -> PerToken:
        """The KL from the reference that is added to the loss and logged, `[B, T]`."""
        return self.kl.estimate(logprobs, ref_logprobs, old_logprobs)
