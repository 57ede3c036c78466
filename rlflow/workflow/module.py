"""`Workflow`, the algorithm whose models and nodes stand in a config."""

from dataclasses import dataclass

from rlflow.functional import Aggregation
from rlflow.module import RLModule
from rlflow.rewards.weighted_sum import RewardLike
from rlflow.values.batch import Batch
from rlflow.values.rollout import Rollout


@dataclass(eq=False)
class Workflow(RLModule):
    """No node and no model of its own: `nodes` and `models` of the config are the algorithm.

    Args:
        reward: What scores a response, for nodes that call `reward_function`.
        group_size: Responses to each prompt, which `generate` samples unless a node says otherwise.
        max_response_length: Tokens after which a response is cut.
        stop_token_ids: Tokens that end a response beside those of the model and its tokenizer.
        mask_truncated: Leave responses that were cut out of losses; they stay in their group's baseline.
        loss_aggregation: How per-token losses become one number.
        max_draws: Batches of prompts that a filter draws at most to fill a step.
    """

    reward: RewardLike | None = None
    group_size: int = 1
    max_response_length: int = 256
    stop_token_ids: tuple[int, ...] = ()
    mask_truncated: bool = False
    loss_aggregation: Aggregation = "token-mean"
    max_draws: int = 10

    def generate(self, batch: Batch, n: int | None = None, temperature: float | None = None) -> Rollout:
        """Sample `n` responses to each prompt, `group_size` by default; see `RLModule.generate`."""
        return super().generate(batch, self.group_size if n is None else n, temperature)
