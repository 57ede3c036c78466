"""Responses that are sampled and scored: the part of an algorithm that is the same for all that learn from rewards."""

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from rlflow import (
    Batch,
    CausalLM,
    Environment,
    Masked,
    PerSample,
    PerToken,
    RewardModel,
    RLModule,
    Rollout,
    Tokens,
    UserError,
    Written,
    node,
)
from rlflow.functional import overlong_penalty, overlong_tokens
from rlflow.rewards import RewardLike


class SampledLogprobs(Masked, Protocol):
    """What is computed between the engine's logprobs and others reads: no prompts and no responses."""

    logprobs: PerToken  # [B, T]
    turn: PerToken  # [B, T], -1 on tokens that the policy did not write


class PolicyLengths(Protocol):
    """What a penalty of lengths reads."""

    @property
    def policy_lengths(self) -> PerSample:
        """`[B]`, how many tokens of each row the policy wrote."""


@dataclass(eq=False)
class Scored(RLModule):
    """Samples responses, and scores them by a verifier, a reward model, an environment, or several of them.

    Args:
        actor: The model to train, which samples at its own temperature.
        reward: What scores a response.
        group_size: Responses to each prompt.
        max_response_length: Tokens after which a response is cut.
        overlong_buffer: Tokens before `max_response_length` over which a penalty grows to 1 (DAPO), as a number or,
            below 1, as a share of `max_response_length`; of a conversation the policy's tokens count. None is off.
        reward_model: Whose score is added to the reward; None is off.
        reward_model_coef: Weight of its score.
        mask_truncated: Leave responses that were cut out of the loss; they stay in their group's baseline.
        stop_token_ids: Tokens that end a response beside those of the model and its tokenizer.
        environment: What answers the actor, turn by turn, so that a response is a conversation; what it gives for all
            turns is added to the reward.
    """

    actor: CausalLM
    reward: RewardLike | None = None
    group_size: int = 1
    max_response_length: int = 256
    overlong_buffer: int | float | None = None
    reward_model: RewardModel | None = None
    reward_model_coef: float = 1.0
    mask_truncated: bool = False
    stop_token_ids: tuple[int, ...] = ()
    environment: Environment | None = field(default=None, kw_only=True)

    learns_from_scores: ClassVar[bool] = True  # of the verifier, or of the reward model
    rewards: ClassVar[object] = None  # the node of that name; None where there is nothing but for validation to score

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)
        if self.reward_model is None:
            self.model_scores = None

    def configure_models(self) -> None:
        if self.reward_model is not None:
            self.reward_model.only_scores()

    @node(role="rollout")
    def rollout(self, batch: Batch) -> Rollout:
        return self.sampled(batch, self.group_size)

    @node(role="reward_model")
    def model_scores(self, rollout: Tokens) -> PerSample:
        return self.reward_model.scores(rollout)

    def sampled(self, batch: Batch, n: int, temperature: float | None = None) -> Rollout:
        """`n` responses to each prompt, or conversations from it."""
        if self.environment is None:
            return self.generate(batch, n, temperature)
        return self.converse(batch, self.environment, n, temperature)

    def outcome(self, rollout: Written, model_scores: PerSample | None, name: str = "reward") -> PerSample:
        """What responses are worth: their score and the overlong penalty; logged under `name`."""
        return self.shaped(rollout.policy_lengths, self.scored(rollout, model_scores, name), name)

    def scored(self, rollout: Written, model_scores: PerSample | None, name: str = "reward") -> PerSample:
        """What environment, verifier and reward model say of responses."""
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


def _check(module: Scored) -> None:
    """Refuse settings that cannot work, before anything is loaded."""
    scores = module.reward, module.reward_model, module.environment
    learns = module.learns_from_scores and type(module).rewards is not None
    if learns and all(each is None for each in scores):
        raise UserError(
            f"`reward` is not set, and {type(module).__name__} learns from scores; name one, such as"
            " rlflow.rewards.ExactMatch, a `reward_model`, or an `environment`"
        )
    if module.overlong_buffer is not None:
        overlong_tokens(module.max_response_length, module.overlong_buffer)
    default = type(module).__dataclass_fields__["reward_model_coef"].default
    if module.reward_model is None and module.reward_model_coef != default:
        raise UserError(f"`reward_model_coef` is {module.reward_model_coef} without a reward model; set `reward_model`")
