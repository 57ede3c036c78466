"""The policy gradient, Williams 1992, as language models are trained with it: InstructGPT, arXiv 2203.02155.

What the algorithms that sample share, in the order of a step: `OnPolicy` samples responses, `Scored` scores them,
`GroupBaseline` makes groups of the responses to a prompt, `TurnCredit` credits the turns of conversations, and
`PolicyGradient` descends the loss; `Ratio` and `Clipped` hold the policy near the one that sampled. An algorithm
inherits from the classes that it uses, and adds the node `advantages`:

    @dataclass(eq=False)
    class Centered(GroupBaseline, Clipped, Scored):
        @node
        def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
            return group_normalized_advantages(rewards, rollout.group, normalize_std=False)

The nodes in the order of a step; `B` samples are on this rank, and the longest has `T` tokens:

    rollout         `group_size` responses to each of this rank's prompts
    model_scores    [B]              from the reward model, if there is one
    ref_logprobs    [B, T]           from the reference, if `kl.coef` is above 0
    old_logprobs    [B, T]           from the policy at the start of the step, see `needs_old_logprobs`
    kl_penalty      [B, T]           if the divergence is subtracted from the reward
    rewards         [B]              scores less penalties; [B, max_turns] if turns are compared
    advantages      [B] or [B, T]    the algorithm's own
    actor_loss      [B, T]           trains; `loss_aggregation` makes one number of it
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from rlflow import (
    Batch,
    CausalLM,
    Environment,
    Harness,
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
    broadcast_to_tokens,
    overlong_penalty,
    overlong_tokens,
    policy_objective,
    ppo_clip_loss,
    ppo_is_clipped,
    rewards_to_go,
    subtree_rewards,
)
from rlflow.rewards import RewardLike
from rlflow.state import AdaptiveCoefficient
from rlflow.types import Sampled, Tokens, WithLossMask, WithTexts

Anchor = Literal["old", "rollout"]
AdvantagesAt = Literal["conversation", "turn", "subtree"]


@dataclass(eq=False)
class OnPolicy(RLModule):
    """Samples responses from the policy that it trains.

    Args:
        actor: The model to train, which samples at its own temperature.
        reward: The reward function that scores a response.
        group_size: Responses to each prompt; a step of P prompts has P * group_size samples.
        max_response_length: Tokens after which a response is cut.
        mask_truncated: Leave responses that were cut out of the loss; they still count in their group's baseline.
        stop_token_ids: Tokens that end a response, in addition to those of the model and its tokenizer.
        environment: The environment that answers the actor turn by turn, so a response is a conversation. The sum of
            its rewards for turns is added to the score.
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
        """`B * n` samples: `n` responses to each of `B` prompts, or with an `environment` `n` conversations.

        To be called in a node that generates. A temperature of 0 takes the likeliest tokens; None is the actor's own.
        """
        if self.environment is None:
            return self.generate(batch, n, temperature)
        return self.converse(batch, self.environment, n, temperature)


@dataclass(eq=False)
class GroupBaseline(OnPolicy):
    """Samples several responses to each prompt, the group that a response's reward is compared with.

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

        reward_i = environment_i + reward(y_i) + reward_model_coef model_i + overlong_i - sum_t kl_penalty_it

    A summand without its setting is left out. With `max_response_length: 1000` and `overlong_buffer: 200`, overlong_i
    is 0 up to 800 tokens, -0.5 at 900 and -1 at 1000.

    Args:
        overlong_buffer: Tokens before `max_response_length` over which a penalty grows to 1 (DAPO). A number below 1
            is a share of `max_response_length`. In a conversation only the policy's tokens count. None is off.
        reward_model: The frozen model whose score is added to the reward; None is off.
        reward_model_coef: Weight of the reward model's score.
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
        self, rollout: WithTexts, model_scores: PerSample | None = None, kl_penalty: PerToken | None = None
    ) -> PerSample:
        rewards = self.outcome(rollout, model_scores)
        return rewards if kl_penalty is None else rewards - kl_penalty.sum(dim=1)

    def outcome(self, rollout: WithTexts, model_scores: PerSample | None, name: str = "reward") -> PerSample:
        """The score of each response plus the overlong penalty, `[B]`; logged as `<name>/outcome`."""
        return self.shaped(rollout.policy_lengths, self.scored(rollout, model_scores, name), name)

    def scored(self, rollout: WithTexts, model_scores: PerSample | None, name: str = "reward") -> PerSample:
        """The sum of the scores of environment, verifier and reward model, `[B]`; called by all ranks of the node.

        Args:
            rollout: The samples, with texts and dataset rows.
            model_scores: `[B]` from the reward model, not yet weighted; None without one.
            name: First part of the names of its metrics: `reward/mean`, `reward/model`.
        """
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
        """The scores `[B]` plus the overlong penalty; `lengths` `[B]` counts the tokens that the policy wrote."""
        outcome = scores
        if self.overlong_buffer is not None:
            penalty = overlong_penalty(lengths, self.max_response_length, self.overlong_buffer)
            self.log(f"{name}/overlong", penalty)
            outcome = outcome + penalty.to(outcome.dtype)
        self.log(f"{name}/outcome", outcome)
        return outcome


class WithTurns(Protocol):
    """The fields of a rollout that the credit of turns and the overlong penalty read."""

    @property
    def policy_lengths(self) -> PerSample:
        """`[B]`, how many tokens of each row the policy wrote."""

    @property
    def turns(self) -> PerSample:
        """`[B]`, how many turns each conversation has."""

    @property
    def returns(self) -> Tensor:
        """`[B, K]`, the environment's reward of each turn, 0 beyond a row's own."""

    @property
    def shared_turns(self) -> Tensor:
        """`[B, K]`, a number of each turn, equal where rows of an episode share it."""


class TokenTurns(Protocol):
    """The field of a rollout that says which turn each token belongs to."""

    turn: PerToken  # [B, T]


@dataclass(eq=False)
class TurnCredit(Scored):
    """Compares whole responses in groups, or the turns of conversations.

        G_k = R - (e_1 + ... + e_k-1)    for turn k: R is the reward of the whole, e_j the environment's for turn j

    Turn k is compared with turn k of the group's other conversations; a conversation that has ended before is compared
    by its last turn. So every turn is compared in the whole group, and if the only reward is given at the end, `turn`
    and `conversation` are the same. With R = 3 and e = 1, 0, 2 the turns have G = 3, 2, 2. Rewards of turns: arXiv
    2505.11821. Their returns, compared in groups: GTPO, arXiv 2511.14846.

    Args:
        advantages_at: `conversation`: one advantage for all turns. `turn`: one for each turn, from its own G_k.
            `subtree`: one for each turn of an agent that owns its loop, from the rows that share the turn, as `TreeRL`
            has it; see `rlflow.functional.subtree_rewards`.
    """

    advantages_at: AdvantagesAt = field(default="conversation", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.advantages_at == "conversation":
            self.turn = None
        elif self.environment is None:
            raise UserError(
                f"`advantages_at` is {self.advantages_at!r} without an `environment`, and a response to a prompt is one"
                " turn; set `environment`, or leave `advantages_at` out"
            )
        elif self.advantages_at == "subtree" and not isinstance(self.environment, Harness):
            raise UserError(
                "`advantages_at` is 'subtree', and conversations with this `environment` share no turns; set it to"
                " 'turn', or take a rlflow.Harness"
            )

    @node
    def turn(self, rollout: TokenTurns) -> PerToken:
        return rollout.turn

    def rewards(
        self, rollout: WithTexts, model_scores: PerSample | None = None, kl_penalty: PerToken | None = None
    ) -> PerSample:
        return self.credited(rollout, super().rewards(rollout, model_scores, kl_penalty))

    def credited(self, rollout: WithTurns, rewards: PerSample) -> PerSample:
        """The numbers that are compared in groups: the rewards `[B]`, or the G_k of all turns, `[B, max_turns]`."""
        if self.advantages_at == "conversation":
            return rewards
        if self.advantages_at == "subtree":
            return subtree_rewards(rewards, rollout.shared_turns, self.environment.max_turns)
        return rewards_to_go(rewards, rollout.returns, rollout.turns, self.environment.max_turns)


class SampledLogprobs(WithLossMask, Protocol):
    """The fields of samples that a node reads to compare the engine's logprobs with others: no token ids."""

    logprobs: PerToken  # [B, T]
    turn: PerToken  # [B, T], -1 on tokens that the policy did not write


@dataclass(eq=False)
class PolicyGradient(OnPolicy):
    """Descends the loss whose gradient is the policy gradient, with KL to a reference and an entropy bonus.

        loss_t = w_t surrogate_t + kl.coef KL_t - entropy_coef H_t,    w_t = min(old_t / rollout_t, 2) by default

    pi is the policy in training, old the trainer's at the start of the step, rollout the engine's when it sampled. Here
    surrogate_t = -A_t log pi_t; subclasses override `surrogate`. Where KL is in the reward, the loss is without it.

    Args:
        kl: Term by which the divergence from the reference restrains the policy, in the loss or in the reward.
        reference: The frozen reference of the KL; None for the actor's initial weights (with LoRA: without adapters).
        entropy_coef: Weight of the entropy bonus.
        importance: Correction w for the difference between rollout and training logprobs; None is off.
        loss_aggregation: Reduction of per-token losses to one number.
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
        """Raise a `UserError` if the actor makes several updates a step and the algorithm allows only one."""
        if self.one_update and self.actor.several_updates:
            several = "epochs" if self.actor.epochs > 1 else "samples_per_update"
            raise UserError(
                f"`actor.{several}` is {getattr(self.actor, several)}, and {type(self).__name__} makes one update a"
                " step; leave it out"
            )

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the node `old_logprobs` scores the samples before the first update; if not, old is pi itself."""
        lora = self.actor.lora
        draws_dropout = lora is not None and lora.dropout > 0  # so training scores are not the policy's own
        return self.actor.several_updates or self.kl.restrains_reward or draws_dropout

    @property
    def ignores_sampler(self) -> bool:
        """Whether the loss ignores that the engine sampled with other weights: without `importance` it does."""
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
        self.log("actor/kl_coef", coefficient, batch_size=1)
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
        settings = self.importance, self.kl, self.entropy_coef
        return policy_objective(loss, logprobs, entropy, old, sampled, ref_logprobs, mask, self.log, *settings)

    def anchored(self, rollout: Sampled, logprobs: PerToken, old_logprobs: PerToken | None) -> PerToken:
        """The logprobs that the surrogate compares with, `[B, T]` without gradient: those at the start of the step."""
        return logprobs.detach() if old_logprobs is None else old_logprobs  # one update a step: old is the trained one

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: PerToken) -> PerToken:
        """The loss whose gradient is the policy gradient: -A log pi. Override it for another one.

        Args:
            logprobs: `[B, T]` of the policy in training, with gradient.
            old_logprobs: `[B, T]` from `anchored`.
            advantages: `[B]`, or `[B, T]`.
            mask: `[B, T]`, True on tokens that count.

        Returns:
            `[B, T]`, or `[B]` for a loss of whole sequences; not masked, since the aggregation leaves padding out.
        """
        return -broadcast_to_tokens(advantages, logprobs) * logprobs


@dataclass(eq=False)
class Ratio(PolicyGradient):
    """A policy gradient whose surrogate has the ratio to an older policy, so that a step may make several updates.

    Args:
        anchor: The policy in the ratio's denominator: `old` is the trainer's at the start of the step, `rollout` is the
            engine's when it sampled. `rollout` needs no forward pass for old logprobs. With it set `importance` to
            null, since the ratio itself corrects for the engine.
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
        """Whether the loss ignores the engine's other weights: with `anchor: rollout` only if it is `unclipped`."""
        return super().ignores_sampler if self.anchor == "old" else self.unclipped

    def anchored(self, rollout: Sampled, logprobs: PerToken, old_logprobs: PerToken | None) -> PerToken:
        """The logprobs of the ratio's denominator, `[B, T]` without gradient."""
        return rollout.logprobs if self.anchor == "rollout" else super().anchored(rollout, logprobs, old_logprobs)


@dataclass(eq=False)
class Clipped(Ratio):
    """PPO's surrogate: -min(r_t A_t, clip(r_t, 1 - clip.low, 1 + clip.high) A_t).

    With the default clip a token with a positive advantage has no gradient where its ratio is above 1.2, one with a
    negative advantage none where it is below 0.8. `actor/clip_fraction` is the share of such tokens.

    Args:
        clip: Range around 1 to which the ratio is clipped.
    """

    clip: Clip = Clip()

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: PerToken) -> PerToken:
        clips = self.clip.low, self.clip.high, self.clip.dual
        self.log("actor/clip_fraction", ppo_is_clipped(logprobs, old_logprobs, advantages, *clips), mask)
        return ppo_clip_loss(logprobs, old_logprobs, advantages, *clips)
