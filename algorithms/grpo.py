"""Group Relative Policy Optimization: DeepSeekMath, arXiv 2402.03300; clip-higher from DAPO, arXiv 2503.14476."""

from rlflow import Batch, CausalLM, Optimizer, PerSample, PerToken, Reward, RLModule, Rollout, UserError, node
from rlflow.functional import (
    Aggregation,
    KLEstimator,
    group_normalized_advantages,
    importance_weights,
    kl_estimate,
    ppo_clip_loss,
    ppo_is_clipped,
)


class GRPO(RLModule):
    """A_i = (r_i - mean_g) / std_g over the group g of a prompt; clipped policy loss, KL to a frozen reference.

    Args:
        model: Folder or hub name of the model to train, or `tiny` for the embedded one.
        reward: What scores a response.
        optimizer: Of the actor.
        group_size: Responses to each prompt, at least 2.
        max_response_length: Tokens after which a response is cut.
        temperature: Of sampling.
        kl_coef: Weight of the KL term; 0 leaves the reference model out.
        kl_kind: Its estimator.
        clip_low: Lower clip range of the ratio.
        clip_high: Upper clip range of the ratio.
        dual_clip: Ratio, above 1, from which a negative advantage no longer counts (arXiv 1912.09729); None is off.
        normalize_std: Divide advantages by std_g; without it they are Dr. GRPO's (arXiv 2503.20783).
        loss_aggregation: How per-token losses become one number.
        epochs: Passes over a step's samples.
        samples_per_update: Samples of one optimizer step; None for all of the step's.
        gradient_checkpointing: Recompute activations in the backward pass to save memory.
    """

    def __init__(
        self,
        model: str,
        reward: Reward,
        optimizer: Optimizer = Optimizer(),
        group_size: int = 8,
        max_response_length: int = 256,
        temperature: float = 1.0,
        kl_coef: float = 0.0,
        kl_kind: KLEstimator = "k3",
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        normalize_std: bool = True,
        loss_aggregation: Aggregation = "token-mean",
        epochs: int = 1,
        samples_per_update: int | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        if group_size < 2:
            raise UserError(f"`group_size` is {group_size}; group-relative advantages need at least 2. Raise it")
        if min(clip_low, clip_high) < 0:
            raise UserError(f"`clip_low` is {clip_low} and `clip_high` is {clip_high}; give both 0 or more")
        if dual_clip is not None and not dual_clip > 1:
            raise UserError(f"`dual_clip` is {dual_clip}; a ratio above 1 (3 in the paper), or null for none")
        self.model = model
        self.reward = reward
        self.optimizer = optimizer
        self.group_size = group_size
        self.max_response_length = max_response_length
        self.temperature = temperature
        self.kl_coef = kl_coef
        self.kl_kind = kl_kind
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.dual_clip = dual_clip
        self.normalize_std = normalize_std
        self.loss_aggregation = loss_aggregation
        self.epochs = epochs
        self.samples_per_update = samples_per_update
        self.gradient_checkpointing = gradient_checkpointing
        if kl_coef == 0:
            self.ref_logprobs = None
        if epochs == 1 and samples_per_update is None:
            self.old_logprobs = None  # one update a step: the policy that is trained is the old one

    def configure_models(self) -> None:
        self.actor = CausalLM(
            self.model,
            optimizer=self.optimizer,
            temperature=self.temperature,
            epochs=self.epochs,
            samples_per_update=self.samples_per_update,
            gradient_checkpointing=self.gradient_checkpointing,
        )
        self.reference = CausalLM(self.model, trainable=False, temperature=self.temperature)

    @node(role="rollout")
    def rollout(self, batch: Batch) -> Rollout:
        return self.generate(batch, n=self.group_size)

    @node
    def rewards(self, rollout: Rollout) -> PerSample:
        return self.reward_function(rollout)

    @node
    def advantages(self, rollout: Rollout, rewards: PerSample) -> PerSample:
        return group_normalized_advantages(rewards, rollout.group, self.normalize_std)

    @node(role="reference")
    def ref_logprobs(self, rollout: Rollout) -> PerToken:
        return self.reference.logprobs(rollout)

    @node(role="actor")
    def old_logprobs(self, rollout: Rollout) -> PerToken:
        return self.actor.logprobs(rollout)

    @node(role="actor", type="train")
    def actor_loss(
        self,
        rollout: Rollout,
        advantages: PerSample,
        old_logprobs: PerToken | None = None,
        ref_logprobs: PerToken | None = None,
    ) -> PerToken:
        mask = rollout.loss_mask
        logprobs, entropy = self.actor.score(rollout)
        old = logprobs.detach() if old_logprobs is None else old_logprobs
        clips = self.clip_low, self.clip_high, self.dual_clip
        loss = ppo_clip_loss(logprobs, old, advantages[:, None], *clips)
        loss = loss * importance_weights(old, rollout.logprobs, mask)

        self.log("actor/clip_fraction", ppo_is_clipped(logprobs, old, advantages[:, None], *clips), mask)
        self.log("actor/entropy", entropy.detach(), mask)
        if ref_logprobs is None:
            return loss
        kl = kl_estimate(logprobs, ref_logprobs, self.kl_kind)
        self.log("actor/kl", kl.detach(), mask)
        return loss + self.kl_coef * kl
