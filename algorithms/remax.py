"""REINFORCE with the greedy response's reward as baseline: ReMax, arXiv 2310.10505."""

from dataclasses import dataclass

from rlflow import Batch, PerSample, Rollout, node

from .policy_gradient import PolicyGradient


@dataclass(eq=False)
class ReMax(PolicyGradient):
    """A = r(x, y) - r(x, greedy y): a second rollout node answers each prompt once, with the likeliest tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_model_path is None:
            self.greedy_model_scores = None

    @node(role="rollout", rows="batch")
    def greedy(self, batch: Batch) -> Rollout:
        return self.generate(batch, temperature=0.0)

    @node(role="reward_model")
    def greedy_model_scores(self, greedy: Rollout) -> PerSample:
        return self.reward_model.scores(greedy)

    @node
    def greedy_rewards(self, greedy: Rollout, greedy_model_scores: PerSample | None = None) -> PerSample:
        return self.outcome(greedy, greedy_model_scores, name="greedy_reward")

    @node
    def advantages(self, rewards: PerSample, greedy_rewards: PerSample) -> PerSample:
        return rewards - greedy_rewards
