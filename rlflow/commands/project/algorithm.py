"""GRPO on one page. A method is a step: its name is the value that it makes, its parameters what it reads."""

from rlflow import Batch, CausalLM, PerSample, PerToken, Reward, RLModule, Rollout, RolloutWithTexts, node
from rlflow.functional import group_normalized_advantages
from rlflow.types import Grouped


class MyGRPO(RLModule):
    """loss_t = -A_i log pi(y_t | x, y_<t), with A_i = (r_i - mean of the group) / std of the group.

    Args:
        actor: The model to train.
        reward: Reward that scores a response.
        group_size: Responses to each prompt.
        max_response_length: Tokens after which a response is cut.
    """

    def __init__(
        self, actor: CausalLM | str, reward: Reward, group_size: int = 8, max_response_length: int = 256
    ) -> None:
        self.actor = actor
        self.reward = reward
        self.group_size = group_size
        self.max_response_length = max_response_length

    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        return self.generate(batch, n=self.group_size)

    @node
    def rewards(self, rollout: RolloutWithTexts) -> PerSample:
        return self.reward_function(rollout)

    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        return group_normalized_advantages(rewards, rollout.group)

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Rollout, advantages: PerSample) -> PerToken:
        return -advantages[:, None] * self.actor.logprobs(rollout)
