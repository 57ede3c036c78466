"""Supervised fine-tuning: the negative log-likelihood of given responses; InstructGPT, arXiv 2203.02155, section 3."""

from dataclasses import dataclass, field

from rlflow import CausalLM, Environment, PerToken, RLModule, node
from rlflow.functional import Aggregation
from rlflow.rewards import RewardLike
from rlflow.types import TokensWithLossMask


@dataclass(eq=False)
class SFT(RLModule):
    """Supervised fine-tuning: trains on given responses by their negative log-likelihood.

    loss_t = -log pi(y_t | x, y_<t); a graph of one node, without rollout.

    Args:
        actor: The model to train. Its temperature is used in validation, and divides the logits of the loss, too.
        reward: The reward function that scores sampled responses in validation; None to sample none.
        max_response_length: Tokens after which a response is cut in validation.
        loss_aggregation: Reduction of per-token losses to one number.
        stop_token_ids: Tokens that end a response, in addition to those of the model and its tokenizer.
        environment: The environment of the dataset's conversations. They use its tools, and it answers the actor in
            validation. None where responses are texts.
    """

    actor: CausalLM | str
    reward: RewardLike | None = None
    max_response_length: int = 256
    loss_aggregation: Aggregation = "token-mean"
    stop_token_ids: tuple[int, ...] = ()
    environment: Environment | None = field(default=None, kw_only=True)

    @node(role="actor", type="train")
    def actor_loss(self, batch: TokensWithLossMask) -> PerToken:
        return -self.actor.logprobs(batch)
