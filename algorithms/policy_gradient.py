"""The policy gradient, Williams 1992, as language models are trained with it: InstructGPT, arXiv 2203.02155."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, get_args

import torch

from rlflow import (
    AdaptiveCoefficient,
    Batch,
    CausalLM,
    LoRA,
    Masked,
    MoE,
    Optimizer,
    PerSample,
    PerToken,
    Reward,
    RewardModel,
    RLModule,
    Rollout,
    Sampled,
    Tokens,
    UserError,
    Written,
    node,
)
from rlflow.functional import (
    Aggregation,
    Importance,
    KLEstimator,
    kl_estimate,
    overlong_penalty,
    overlong_tokens,
    ppo_clip_loss,
    ppo_is_clipped,
)

Anchor = Literal["old", "rollout"]


class SampledLogprobs(Masked, Protocol):
    """What is computed between the engine's logprobs and others reads: no prompts and no responses."""

    logprobs: PerToken  # [B, T]


@dataclass(eq=False)
class PolicyGradient(RLModule):
    """What the algorithms that sample share. A subclass adds the node `advantages`, and its `surrogate` if not PPO's.

        loss_t = w_t surrogate_t + kl_coef KL_t - entropy_coef H_t,    w = importance weights of old over rollout

    Args:
        model: Folder or hub name of the model to train, or `tiny` for the embedded one.
        reward: What scores a response.
        optimizer: Of the actor.
        group_size: Responses to each prompt.
        max_response_length: Tokens after which a response is cut.
        temperature: Of sampling.
        clip_low: How far the ratio may fall below 1 and still count.
        clip_high: How far the ratio may rise above 1 and still count.
        anchor: Whose logprobs stand below the ratio: the trainer's at the start of the step (`old`), or the engine's
            when it sampled (`rollout`), with no pass for old ones and no importance weight, which would correct twice.
        dual_clip: Ratio, above 1, from which a negative advantage no longer counts (arXiv 1912.09729); None is off.
        kl_coef: Weight of the KL divergence from the reference; 0 leaves the reference out.
        kl_kind: Its estimator; k3-ratio in a loss, k1 in a reward have the gradient of KL (arXiv 2512.21852).
        kl_in_reward: Take the divergence off the rewards instead of adding it to the loss.
        kl_target: Adapt `kl_coef` to hold the divergence per token here (arXiv 1909.08593); needs `kl_in_reward`.
        kl_horizon: Samples over which `kl_coef` adapts.
        reference_path: Folder or hub name of the reference; None for `model` as it was.
        entropy_coef: Weight of the entropy bonus.
        importance: Correction for the gap between rollout and training logprobs; None is off.
        overlong_buffer: Tokens before `max_response_length` over which a penalty grows to 1 (DAPO), as a number or,
            below 1, as a share of `max_response_length`; None is off.
        reward_model_path: Folder or hub name of a reward model, whose score is added to the reward; None is off.
        reward_model_coef: Weight of its score.
        mask_truncated: Leave responses that were cut out of the loss; they stay in their group's baseline.
        loss_aggregation: How per-token losses become one number.
        epochs: Passes over a step's samples.
        samples_per_update: Samples of one optimizer step; None for all of the step's.
        lora: Train low-rank adapters of these settings instead of all weights; the reference is then the model without.
        moe: How routers and experts of a mixture of experts are trained; None for as all weights are.
        gradient_checkpointing: Recompute activations in the backward pass to save memory.
    """

    model: str
    reward: Reward | None = None
    optimizer: Optimizer = Optimizer()
    group_size: int = 1
    max_response_length: int = 256
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    anchor: Anchor = "old"
    kl_coef: float = 0.0
    kl_kind: KLEstimator = "k3-ratio"
    kl_in_reward: bool = False
    kl_target: float | None = None
    kl_horizon: float = 10_000.0
    reference_path: str | None = None
    entropy_coef: float = 0.0
    importance: Importance | None = Importance()
    overlong_buffer: int | float | None = None
    reward_model_path: str | None = None
    reward_model_coef: float = 1.0
    mask_truncated: bool = False
    loss_aggregation: Aggregation = "token-mean"
    epochs: int = 1
    samples_per_update: int | None = None
    lora: LoRA | None = None
    moe: MoE | None = None
    gradient_checkpointing: bool = False

    compares_group: ClassVar[bool] = False  # whether advantages are relative to other samples of the prompt
    unused: ClassVar[tuple[str, ...]] = ()  # settings that the algorithm has no use for
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "anchor": get_args(Anchor),
        "kl_kind": get_args(KLEstimator),
        "loss_aggregation": get_args(Aggregation),
    }

    def __post_init__(self) -> None:
        _check(self)
        self.kl = AdaptiveCoefficient(self.kl_coef, self.kl_target, self.kl_horizon)
        if self.kl_coef == 0:
            self.ref_logprobs = None
        if self.reward_model_path is None:
            self.model_scores = None
        if not self._restrains_reward:
            self.kl_penalty = None
        if not self.needs_old_logprobs:
            self.old_logprobs = None  # one update a step: the policy that is trained is the old one

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether a node scores the samples before the first update of a step."""
        if self.anchor == "rollout":
            return False
        draws_dropout = self.lora is not None and self.lora.dropout > 0  # so training scores are not the policy's own
        return self.epochs > 1 or self.samples_per_update is not None or self._restrains_reward or draws_dropout

    @property
    def ignores_sampler(self) -> bool:
        """With `anchor: old` a clip is around the policy at the start of the step; importance weights know who sampled.

        With one update a step the ratio to that policy is 1, and no clip acts at all.
        """
        return self.importance is None if self.anchor == "old" else self.unclipped

    @property
    def _restrains_reward(self) -> bool:
        return self.kl_in_reward and self.kl_coef > 0

    def configure_models(self) -> None:
        self.actor = CausalLM(
            self.model,
            optimizer=self.optimizer,
            temperature=self.temperature,
            epochs=self.epochs,
            samples_per_update=self.samples_per_update,
            gradient_checkpointing=self.gradient_checkpointing,
            lora=self.lora,
            moe=self.moe,
        )
        if self.lora is not None and self.reference_path is None:
            self.reference = self.actor.without_adapters()
        else:
            self.reference = CausalLM(self.reference_path or self.model, trainable=False, temperature=self.temperature)
        if self.reward_model_path is not None:
            self.reward_model = RewardModel(self.reward_model_path, trainable=False)

    @node(role="rollout")
    def rollout(self, batch: Batch) -> Rollout:
        return self.generate(batch, n=self.group_size)

    @node(role="reward_model")
    def model_scores(self, rollout: Tokens) -> PerSample:
        return self.reward_model.scores(rollout)

    @node
    def rewards(
        self, rollout: Written, model_scores: PerSample | None = None, kl_penalty: PerToken | None = None
    ) -> PerSample:
        rewards = self.outcome(rollout, model_scores)
        return rewards if kl_penalty is None else rewards - kl_penalty.sum(dim=1)  # 0 where padded

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
        kl = kl_estimate(sampled, ref_logprobs, self.kl_kind)
        coefficient, mask = self.kl.value, rollout.loss_mask
        self.kl.update(float(self.mean(kl, mask)), rows=len(self.all_rows(rollout.lengths)))
        self.log("actor/kl_coef", kl.new_tensor(coefficient))
        return coefficient * kl

    @node(role="actor", type="train")
    def actor_loss(
        self,
        rollout: Sampled,
        advantages: PerSample | PerToken,
        old_logprobs: PerToken | None = None,
        ref_logprobs: PerToken | None = None,
    ) -> PerToken:
        mask = rollout.loss_mask
        logprobs, entropy = self.actor.score(rollout)
        old = self.anchored(rollout, logprobs, old_logprobs)
        loss = self.surrogate(logprobs, old, advantages, mask)
        if loss.dim() == 1:  # of whole sequences: the mean over a sequence's tokens is the sequence's
            loss = loss[:, None].expand_as(logprobs)
        if self.importance is not None:
            loss = loss * self.importance.weights(old, rollout.logprobs, mask)
            self.log("actor/importance_dropped", self.importance.dropped(old, rollout.logprobs, mask), mask)
        self.log("actor/entropy", entropy.detach(), mask)
        if self.entropy_coef != 0:
            loss = loss - self.entropy_coef * entropy
        if ref_logprobs is None:
            return loss
        kl = self.divergence(logprobs, ref_logprobs, old, mask)
        self.log("actor/kl", kl.detach(), mask)
        return loss if self.kl_in_reward else loss + self.kl_coef * kl

    def anchored(self, rollout: Sampled, logprobs: PerToken, old_logprobs: PerToken | None) -> PerToken:
        """The logprobs below the ratio, `[B, T]` without gradient, as `anchor` says."""
        if self.anchor == "rollout":
            return rollout.logprobs
        return logprobs.detach() if old_logprobs is None else old_logprobs  # one update a step: old is the trained one

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: PerToken) -> PerToken:
        """The loss whose gradient is the policy gradient, `[B, T]`, or `[B]` of whole sequences."""
        clips = self.clip_low, self.clip_high, self.dual_clip
        self.log("actor/clip_fraction", ppo_is_clipped(logprobs, old_logprobs, advantages, *clips), mask)
        return ppo_clip_loss(logprobs, old_logprobs, advantages, *clips)

    def divergence(
        self, logprobs: PerToken, ref_logprobs: PerToken, old_logprobs: PerToken, mask: PerToken
    ) -> PerToken:
        """The KL from the reference that is added to the loss and logged, `[B, T]`."""
        return kl_estimate(logprobs, ref_logprobs, self.kl_kind, old_logprobs)

    def outcome(self, rollout: Written, model_scores: PerSample | None, name: str = "reward") -> PerSample:
        """What responses are worth: their score and the overlong penalty; logged under `name`."""
        return self.shaped(rollout.lengths, self.scored(rollout, model_scores, name), name)

    def scored(self, rollout: Written, model_scores: PerSample | None, name: str = "reward") -> PerSample:
        """What verifier and reward model say of responses."""
        scores = rollout.lengths.new_zeros(len(rollout.lengths), dtype=torch.float32)
        if self.reward is not None:
            scores = scores + self.reward_function(rollout, name)
        if model_scores is not None:
            self.log(f"{name}/model", model_scores)
            scores = scores + self.reward_model_coef * model_scores
        return scores

    def shaped(self, lengths: PerSample, scores: PerSample, name: str = "reward") -> PerSample:
        """The scores with the overlong penalty of responses of these lengths."""
        outcome = scores
        if self.overlong_buffer is not None:
            penalty = overlong_penalty(lengths, self.max_response_length, self.overlong_buffer)
            self.log(f"{name}/overlong", penalty)
            outcome = outcome + penalty.to(outcome.dtype)
        self.log(f"{name}/outcome", outcome)
        return outcome


def _check(module: PolicyGradient) -> None:
    """Refuse settings that cannot work, before anything is loaded."""
    name, fields = type(module).__name__, type(module).__dataclass_fields__
    if module.reward is None and module.reward_model_path is None and type(module).rewards is not None:
        raise UserError(
            f"`reward` is not set, and {name} learns from scores; name one, such as rlflow.rewards.ExactMatch, or a"
            " `reward_model_path`"
        )
    if module.compares_group and module.group_size < 2:
        raise UserError(f"`group_size` is {module.group_size}; group-relative advantages need at least 2. Raise it")
    for setting in module.unused:
        if getattr(module, setting) != fields[setting].default:
            raise UserError(f"`{setting}` is {getattr(module, setting)}, which {name} has no use for; leave it out")
    for setting, choice in module.choices.items():
        if getattr(module, setting) not in choice:
            raise UserError(f"`{setting}` is {getattr(module, setting)!r}; give one of {', '.join(choice)}")
    if min(module.clip_low, module.clip_high) < 0:
        raise UserError(f"`clip_low` is {module.clip_low} and `clip_high` is {module.clip_high}; give both 0 or more")
    if module.dual_clip is not None and not module.dual_clip > 1:
        raise UserError(f"`dual_clip` is {module.dual_clip}; a ratio above 1 (3 in the paper), or null for none")
    if module.anchor == "rollout" and module.importance is not None:
        raise UserError(
            "`anchor` is 'rollout', so the ratio itself corrects for what the engine sampled, and `importance` would"
            " correct twice; set `importance` to null"
        )
    if module.kl_coef < 0:
        raise UserError(f"`kl_coef` is {module.kl_coef}; give 0 or more")
    if module.reference_path is not None and module.kl_coef == 0:
        raise UserError(
            f"`reference_path` is {module.reference_path!r} and `kl_coef` is 0, so the reference would not be loaded;"
            " raise `kl_coef` or leave `reference_path` out"
        )
    if module.kl_coef > 0 and module.kl_in_reward and module.kl_kind == "k3-ratio":
        raise UserError(
            "`kl_kind` is 'k3-ratio' and `kl_in_reward` is true, but its ratio is for the gradient of a loss; set"
            " `kl_kind` to 'k1', whose gradient in a reward is that of KL"
        )
    if module.kl_coef > 0 and not module.kl_in_reward and module.kl_kind == "k1":
        raise UserError(
            "`kl_kind` is 'k1' and `kl_in_reward` is false, but the expected gradient of k1 in a loss is 0; set"
            " `kl_kind` to 'k3-ratio', or `kl_in_reward` to true"
        )
    if module.kl_target is not None and not module.kl_in_reward:
        raise UserError(f"`kl_target` is {module.kl_target}, and adapts KL in the reward; set `kl_in_reward` to true")
    if module.kl_target is not None and not (module.kl_target > 0 and module.kl_coef > 0):
        raise UserError(
            f"`kl_target` is {module.kl_target} and `kl_coef` is {module.kl_coef}, which is adapted by"
            " multiplication; give both more than 0"
        )
    if not module.kl_horizon > 0:
        raise UserError(f"`kl_horizon` is {module.kl_horizon}; it is a number of samples above 0")
    if module.overlong_buffer is not None:
        overlong_tokens(module.max_response_length, module.overlong_buffer)
    if module.reward_model_path is None and module.reward_model_coef != fields["reward_model_coef"].default:
        raise UserError(
            f"`reward_model_coef` is {module.reward_model_coef} without a reward model; set `reward_model_path`"
        )
