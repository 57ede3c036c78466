"""Best-of-n distillation as RAFT, arXiv 2304.06767, does it: train on the best of each prompt's responses."""

from dataclasses import dataclass

from rlflow import Batch, CausalLM, PerSample, PerToken, RLModule, Rollout, UserError, node
from rlflow.functional import Aggregation
from rlflow.rewards import RewardLike
from rlflow.types import Each, Grouped, NewRows, TokensWithLossMask, WithTexts


@dataclass(eq=False)
class RAFT(RLModule):
    """Reward-ranked fine-tuning: trains on the best of several sampled responses to each prompt.

    loss_t = -log pi(y_t | x, y_<t), where y has the highest reward of `group_size` sampled responses to x.

    A prompt is left out if all its responses have the same reward. `best/share` is the share of the other prompts,
    `best/reward` the mean of the highest rewards.

    Args:
        actor: The policy.
        reward: The reward function that scores a response.
        group_size: Responses to each prompt, at least 2; one of them is trained on.
        max_response_length: Tokens after which a response is cut.
        loss_aggregation: Reduction of per-token losses to one number.
    """

    actor: CausalLM | str
    reward: RewardLike
    group_size: int = 8
    max_response_length: int = 256
    loss_aggregation: Aggregation = "token-mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 2:
            raise UserError(f"`group_size` is {self.group_size}; the best is chosen of at least 2. Raise it")

    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        return self.generate(batch, self.group_size)

    @node
    def rewards(self, rollout: WithTexts) -> PerSample:
        return self.reward_function(rollout)

    @node
    def best(self, batch: Grouped, rollout: Each[Rollout], rewards: Each[PerSample]) -> NewRows[Rollout]:
        differ = rewards.max() > rewards.min()  # [B] prompts
        self.log("best/share", differ.float())
        self.log("best/reward", rewards.max())
        return rollout.values.take(rewards.argmax()[differ])

    @node(role="actor", type="train")
    def actor_loss(self, best: TokensWithLossMask) -> PerToken:
        return -self.actor.logprobs(best)
