"""REINFORCE with the greedy response's reward as baseline: ReMax, arXiv 2310.10505."""

from dataclasses import dataclass
from typing import ClassVar

from rlflow import Batch, PerSample, PerToken, Rollout, node
from rlflow.functional import last_token_rewards, reinforce_returns
from rlflow.types import Each, Grouped, Tokens, WithLossMask, WithTexts

from .policy_gradient import Clipped, Scored


@dataclass(eq=False)
class ReMax(Clipped, Scored):
    """The reward less the reward of the prompt's greedy response, which a second node generates; no group.

        A_t = r(x, y) - r(x, greedy y) - kl.coef (k1_t + k1_t+1 + ... to the end)

    The greedy response takes the likeliest token each time; it is scored like a sample, logged under `greedy_reward/`,
    and not trained on.
    """

    kl_in_reward: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_model is None:
            self.greedy_model_scores = None

    @node(generates="actor")
    def greedy(self, batch: Batch) -> Rollout:
        return self.sampled(batch, 1, temperature=0.0)

    @node(role="reward_model")
    def greedy_model_scores(self, greedy: Tokens) -> PerSample:
        return self.reward_model.scores(greedy)

    @node
    def greedy_rewards(self, greedy: WithTexts, greedy_model_scores: PerSample | None = None) -> PerSample:
        return self.outcome(greedy, greedy_model_scores, name="greedy_reward")

    @node
    def rewards(self, rollout: WithTexts, model_scores: PerSample | None = None) -> PerSample:
        return self.outcome(rollout, model_scores)

    @node
    def baseline(self, batch: Grouped, greedy_rewards: Each[PerSample]) -> PerSample:
        return greedy_rewards.mean()

    @node
    def advantages(
        self, rollout: WithLossMask, rewards: PerSample, baseline: PerSample, kl_penalty: PerToken | None = None
    ) -> PerToken:
        r = last_token_rewards(rewards - baseline, rollout.loss_mask, kl_penalty)
        return reinforce_returns(r, rollout.loss_mask, gamma=1.0)
