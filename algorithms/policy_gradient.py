"""The policy gradient, Williams 1992, as language models are trained with it: InstructGPT, arXiv 2203.02155.

What the algorithms that sample share, in the order of a step: `OnPolicy` samples responses, `Scored` scores them,
`GroupBaseline` compares those to one prompt, `TurnCredit` credits the turns of conversations, and `PolicyGradient`
descends the loss; `Ratio` and `Clipped` hold the policy near the one that sampled. An algorithm names those that it
uses, and adds the node `advantages`.

The nodes in the order of a step; `B` samples are on this rank, and the longest has `T` tokens:

    rollout         `group_size` responses to each of this rank's prompts
    model_scores    [B]              of the reward model, where there is one
    ref_logprobs    [B, T]           of the reference, where `kl.coef` is above 0
    old_logprobs    [B, T]           of the policy at the start of the step, where a step makes several updates
    kl_penalty      [B, T]           where the divergence comes off the reward
    rewards         [B]              scores less penalties; [B, turns] where turns are compared
    advantages      [B] or [B, T]    the algorithm's own
    actor_loss      [B, T]           trains; `loss_aggregation` makes one number of it
"""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from rlflow import (
    Batch,
    CausalLM,
    Environment,
    PerSample,
    PerToken,
    RewardModel,
    RLModule,
    Rollout,
    UserError,
    node,
)
from rlflow.functional import (
    KL,
    Aggregation,
    Clip,
    Importance,
    KLEstimator,
    at_turns,
    beside_tokens,
    overlong_penalty,
    overlong_tokens,
    policy_objective,
    ppo_clip_loss,
    ppo_is_clipped,
    rewards_to_go,
)
from rlflow.rewards import RewardLike
from rlflow.state import AdaptiveCoefficient
from rlflow.types import Masked, Sampled, Tokens, Written

Anchor = Literal["old", "rollout"]
AdvantagesAt = Literal["conversation", "turn"]


@dataclass(eq=False)
class OnPolicy(RLModule):
    """Samples responses from the policy that it trains.

    Args:
        actor: The model to train, which samples at its own temperature.
        reward: What scores a response.
        group_size: Responses to each prompt.
        max_response_length: Tokens after which a response is cut.
        mask_truncated: Leave responses that were cut out of the loss; they stay in their group's baseline.
        stop_token_ids: Tokens that end a response beside those of the model and its tokenizer.
        environment: What answers the actor, turn by turn, so that a response is a conversation; what it gives for all
            turns is added to the reward.
    """

    actor: CausalLM | str
    reward: RewardLike | None = None
    group_size: int = 1
    max_response_length: int = 256
    mask_truncated: bool = False
    stop_token_ids: tuple[int, ...] = ()
    environment: Environment | None = field(default=None, kw_only=True)

    @node(role="rollout")
    def rollout(self, batch: Batch) -> Rollout:
        return self.sampled(batch, self.group_size)

    def sampled(self, batch: Batch, n: int, temperature: float | None = None) -> Rollout:
        """`n` responses to each prompt, or conversations from it."""
        if self.environment is None:
            return self.generate(batch, n, temperature)
        return self.converse(batch, self.environment, n, temperature)


@dataclass(eq=False)
class GroupBaseline(OnPolicy):
    """Compares a response with the others to its prompt.

    Args:
        group_size: Responses to each prompt, at least 2.
    """

    group_size: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 2:
            raise UserError(f"`group_size` is {self.group_size}; group-relative advantages need at least 2. Raise it")


@dataclass(eq=False)
class Scored(OnPolicy):
    """Scores responses by a verifier, a reward model, an environment, or several of them.

    Args:
        overlong_buffer: Tokens before `max_response_length` over which a penalty grows to 1 (DAPO), as a number or,
            below 1, as a share of `max_response_length`; of a conversation the policy's tokens count. None is off.
        reward_model: Whose score is added to the reward; None is off.
        reward_model_coef: Weight of its score.
    """

    overlong_buffer: int | float | None = None
    reward_model: RewardModel | str | None = None
    reward_model_coef: float = 1.0

    learns_from_scores: ClassVar[bool] = True  # of the verifier, the reward model or the environment

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learns_from_scores and all(x is None for x in (self.reward, self.reward_model, self.environment)):
            raise UserError(
                f"`reward` is not set, and {type(self).__name__} learns from scores; name one, such as"
                " rlflow.rewards.ExactMatch, a `reward_model`, or an `environment`"
            )
        if self.overlong_buffer is not None:
            overlong_tokens(self.max_response_length, self.overlong_buffer)
        if self.reward_model is not None:
            return
        self.model_scores = None
        if self.reward_model_coef != type(self).__dataclass_fields__["reward_model_coef"].default:
            raise UserError(
                f"`reward_model_coef` is {self.reward_model_coef} without a reward model; set `reward_model`"
            )

    def configure_models(self) -> None:
        if self.reward_model is not None:
            self.reward_model.only_scores()
        super().configure_models()

    @node(role="reward_model")
    def model_scores(self, rollout: Tokens) -> PerSample:
        return self.reward_model.scores(rollout)

    @node
    def rewards(
        self, rollout: Written, model_scores: PerSample | None = None, kl_penalty: PerToken | None = None
    ) -> PerSample:
        rewards = self.outcome(rollout, model_scores)
        return rewards if kl_penalty is None else rewards - kl_penalty.sum(dim=1)

    def outcome(self, rollout: Written, model_scores: PerSample | None, name: str = "reward") -> PerSample:
        """What responses are worth: their score and the overlong penalty; logged under `name`."""
        return self.shaped(rollout.policy_lengths, self.scored(rollout, model_scores, name), name)

    def scored(self, rollout: Written, model_scores: PerSample | None, name: str = "reward") -> PerSample:
        """The sum of the scores of environment, verifier and reward model, `[B]`."""
        scores = rollout.lengths.new_zeros(len(rollout.lengths), dtype=torch.float32)
        if self.environment is not None:
            scores = scores + self.environment_returns(rollout, name)
        if self.reward is not None:
            scores = scores + self.reward_function(rollout, name)
        if model_scores is not None:
            self.log(f"{name}/model", model_scores)
            scores = scores + self.reward_model_coef * model_scores
        return scores

    def shaped(self, lengths: PerSample, scores: PerSample, name: str = "reward") -> PerSample:
        """The scores with the overlong penalty of responses of which the policy wrote so many tokens, `[B]`."""
        outcome = scores
        if self.overlong_buffer is not None:
            penalty = overlong_penalty(lengths, self.max_response_length, self.overlong_buffer)
            self.log(f"{name}/overlong", penalty)
            outcome = outcome + penalty.to(outcome.dtype)
        self.log(f"{name}/outcome", outcome)
        return outcome


class Earned(Protocol):
    """What each turn of a conversation was given, and how much of the row the policy wrote."""

    @property
    def policy_lengths(self) -> PerSample:
        """`[B]`, how many tokens of each row the policy wrote."""

    @property
    def turns(self) -> PerSample:
        """`[B]`, how many each has."""

    @property
    def returns(self) -> Tensor:
        """`[B, K]`, the reward of each, 0 beyond a row's own."""


class TokenTurns(Protocol):
    """Which turn each token belongs to."""

    turn: PerToken  # [B, T]


@dataclass(eq=False)
class TurnCredit(Scored):
    """Compares whole responses in groups, or the turns of conversations.

        G_k = R - (e_1 + ... + e_k-1)    of turn k: R is the reward of the whole, e_j what the environment gave for j

    Turn k is compared with turn k of the group's other conversations; one that was over before stands there with its
    last turn. So every turn has the whole group to be compared with, and where all is given at the end, `turn` is
    `conversation`. Rewards of turns: arXiv 2505.11821. Their returns, compared in groups: GTPO, arXiv 2511.14846.

    Args:
        advantages_at: `conversation`: one advantage for all turns. `turn`: one for each, of what is given from it on.
    """

    advantages_at: AdvantagesAt = field(default="conversation", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.advantages_at == "conversation":
            self.turn = None
        elif self.environment is None:
            raise UserError(
                "`advantages_at` is 'turn' without an `environment`, and a response to a prompt is one turn; set"
                " `environment`, or leave `advantages_at` out"
            )

    @node
    def turn(self, rollout: TokenTurns) -> PerToken:
        return rollout.turn

    def rewards(
        self, rollout: Written, model_scores: PerSample | None = None, kl_penalty: PerToken | None = None
    ) -> PerSample:
        return self.credited(rollout, super().rewards(rollout, model_scores, kl_penalty))

    def credited(self, rollout: Earned, rewards: PerSample) -> PerSample:
        """What is compared in groups: the rewards `[B]`, or `[B, max_turns]` rewards-to-go of each turn."""
        if self.advantages_at == "conversation":
            return rewards
        return rewards_to_go(rewards, rollout.returns, rollout.turns, self.environment.max_turns)


class SampledLogprobs(Masked, Protocol):
    """What is computed between the engine's logprobs and others reads: no prompts and no responses."""

    logprobs: PerToken  # [B, T]
    turn: PerToken  # [B, T], -1 on tokens that the policy did not write


@dataclass(eq=False)
class PolicyGradient(OnPolicy):
    """Descends the loss whose gradient is the policy gradient, with KL to a reference and an entropy bonus.

        loss_t = w_t surrogate_t + kl.coef KL_t - entropy_coef H_t,    w = importance weights of old over rollout

    Args:
        kl: How the divergence from the reference restrains the policy, in the loss or in the reward.
        reference: Where the divergence is measured from; None for the actor as it was, without adapters under LoRA.
        entropy_coef: Weight of the entropy bonus.
        importance: Correction for the gap between rollout and training logprobs; None is off.
        loss_aggregation: How per-token losses become one number.
    """

    kl: KL = KL()
    reference: CausalLM | str | None = None
    entropy_coef: float = 0.0
    importance: Importance | None = Importance()
    loss_aggregation: Aggregation = "token-mean"

    one_update: ClassVar[bool] = True  # whether the gradient is right for the policy that sampled alone
    kl_in_reward: ClassVar[bool] = False  # where the divergence stands, if `kl` does not say
    kl_in_loss: ClassVar[KLEstimator] = "k3-ratio"  # its estimator there, if `kl` does not say

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_updates()
        if self.kl.in_reward and type(self).kl_penalty is None:
            name = type(self).__name__
            raise UserError(f"`kl.in_reward` is true, and {name} has no rewards to take it off; set it to false")
        if self.reference is not None and self.kl.coef == 0:
            raise UserError(
                f"`reference.model` is {self.reference.model!r} and `kl.coef` is 0, so it would not be loaded; raise"
                " `kl.coef` or leave `reference` out"
            )
        self.kl = self.kl.filled(self.kl_in_reward, self.kl_in_loss)
        self.kl_coefficient = AdaptiveCoefficient(self.kl.coef, self.kl.target, self.kl.horizon)
        if self.kl.coef == 0:
            self.ref_logprobs = None
        if not self.kl.restrains_reward:
            self.kl_penalty = None

    def check_updates(self) -> None:
        """Refuse several updates a step where the algorithm makes one."""
        if self.one_update and self.actor.several_updates:
            several = "epochs" if self.actor.epochs > 1 else "samples_per_update"
            raise UserError(
                f"`actor.{several}` is {getattr(self.actor, several)}, and {type(self).__name__} makes one update a"
                " step; leave it out"
            )

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether a node scores the samples before the first update of a step."""
        lora = self.actor.lora
        draws_dropout = lora is not None and lora.dropout > 0  # so training scores are not the policy's own
        return self.actor.several_updates or self.kl.restrains_reward or draws_dropout

    @property
    def ignores_sampler(self) -> bool:
        """A loss is that of the policy at the start of the step; importance knows who sampled."""
        return self.importance is None

    def configure_models(self) -> None:
        self.check_updates()
        vars(self).pop("old_logprobs", None)
        if not self.needs_old_logprobs:
            self.old_logprobs = None  # one update a step: the policy that is trained is the old one
        super().configure_models()
        if self.reference is None:
            self.reference = self.actor.initial()
        else:
            self.reference.only_scores(like=self.actor)  # type: ignore[arg-type]

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
        """The policy's logprobs at the start of the step, `[B, T]` without gradient."""
        return logprobs.detach() if old_logprobs is None else old_logprobs  # one update a step: old is the trained one

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: PerToken) -> PerToken:
        """The loss whose gradient is the policy gradient, `[B, T]`, or `[B]` of whole sequences: -A log pi."""
        return -beside_tokens(advantages, logprobs) * logprobs

    def divergence(self, logprobs: PerToken, ref_logprobs: PerToken, old_logprobs: PerToken, _: PerToken) -> PerToken:
        """The KL from the reference that is added to the loss and logged, `[B, T]`."""
        return self.kl.estimate(logprobs, ref_logprobs, old_logprobs)


@dataclass(eq=False)
class Ratio(PolicyGradient):
    """A policy gradient whose surrogate has the ratio to an older policy, so that a step may make several updates.

    Args:
        anchor: Whose logprobs stand below the ratio: the trainer's at the start of the step (`old`), or the engine's
            when it sampled (`rollout`), with no pass for old ones and no importance weight, which would correct twice.
    """

    anchor: Anchor = "old"

    one_update: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor == "rollout" and self.importance is not None:
            raise UserError(
                "`anchor` is 'rollout', so the ratio itself corrects for what the engine sampled, and `importance`"
                " would correct twice; set `importance` to null"
            )

    @property
    def needs_old_logprobs(self) -> bool:
        return self.anchor == "old" and super().needs_old_logprobs

    @property
    def ignores_sampler(self) -> bool:
        """With `anchor: old` a clip is around the policy at the start of the step; importance knows who sampled."""
        return super().ignores_sampler if self.anchor == "old" else self.unclipped

    def anchored(self, rollout: Sampled, logprobs: PerToken, old_logprobs: PerToken | None) -> PerToken:
        """The logprobs below the ratio, `[B, T]` without gradient."""
        return rollout.logprobs if self.anchor == "rollout" else super().anchored(rollout, logprobs, old_logprobs)


@dataclass(eq=False)
class Clipped(Ratio):
    """PPO's surrogate: -min(r_t A_t, clip(r_t, 1 - clip.low, 1 + clip.high) A_t).

    Args:
        clip: How far the ratio may leave 1 and still count.
    """

    clip: Clip = Clip()

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: PerToken) -> PerToken:
        clips = self.clip.low, self.clip.high, self.clip.dual
        self.log("actor/clip_fraction", ppo_is_clipped(logprobs, old_logprobs, advantages, *clips), mask)
        return ppo_clip_loss(logprobs, old_logprobs, advantages, *clips)
