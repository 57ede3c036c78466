"""Supervised fine-tuning: the negative log-likelihood of given responses; InstructGPT, arXiv 2203.02155, section 3."""

from dataclasses import dataclass, field

from rlflow import CausalLM, Environment, PerToken, Reward, RLModule, node
from rlflow.functional import Aggregation
from rlflow.types import MaskedTokens


@dataclass(eq=False)
class SFT(RLModule):
    """loss_t = -log pi(y_t | x, y_<t); a graph of one node, without rollout.

    Args:
        actor: The model to train. Its temperature is that of validation, and divides the logits of the loss too.
        reward: What scores responses in validation; None where there is none.
        max_response_length: Tokens after which a response is cut in validation.
        loss_aggregation: How per-token losses become one number.
        stop_token_ids: Tokens that end a response beside those of the model and its tokenizer.
        environment: With whose tools conversations of the dataset were held, and which answers in validation; None
            where responses are texts.
    """

    actor: CausalLM | str
    reward: Reward | None = None
    max_response_length: int = 256
    loss_aggregation: Aggregation = "token-mean"
    stop_token_ids: tuple[int, ...] = ()
    environment: Environment | None = field(default=None, kw_only=True)

    @node(role="actor", type="train")
    def actor_loss(self, batch: MaskedTokens) -> PerToken:
        return -self.actor.logprobs(batch)
