"""REINFORCE++, arXiv 2501.03262: REINFORCE with PPO's clip, KL per token, and advantages over the whole batch."""

from dataclasses import dataclass
from typing import ClassVar

from rlflow import PerSample, PerToken, node
from rlflow.functional import last_token_rewards, reinforce_returns
from rlflow.types import WithLossMask, WithTexts

from .policy_gradient import Clipped, Scored


@dataclass(eq=False)
class REINFORCEPlusPlus(Clipped, Scored):
    """Returns of each token, whitened over all tokens of the step on all ranks, in PPO's clipped loss; no group.

        G_t = r 1[t is last] - kl.coef k1_t + gamma G_t+1
        A_t = (G_t - mean) / std

    Args:
        gamma: Discount of a token.
    """

    gamma: float = 1.0

    kl_in_reward: ClassVar[bool] = True

    @node
    def rewards(self, rollout: WithTexts, model_scores: PerSample | None = None) -> PerSample:
        return self.outcome(rollout, model_scores)

    @node
    def advantages(self, rollout: WithLossMask, rewards: PerSample, kl_penalty: PerToken | None = None) -> PerToken:
        r = last_token_rewards(rewards, rollout.loss_mask, kl_penalty)
        return self.whiten(reinforce_returns(r, rollout.loss_mask, self.gamma), rollout.loss_mask)
