"""Supervised fine-tuning: the negative log-likelihood of given responses; InstructGPT, arXiv 2203.02155, section 3."""

from dataclasses import dataclass

from rlflow import CausalLM, LoRA, MaskedTokens, MoE, Optimizer, PerToken, Reward, RLModule, node
from rlflow.functional import Aggregation


@dataclass(eq=False)
class SFT(RLModule):
    """loss_t = -log pi(y_t | x, y_<t); a graph of one node, without rollout.

    Args:
        model: Folder or hub name of the model to train, or `tiny` for the embedded one.
        optimizer: Of the actor.
        reward: What scores responses in validation; None where there is none.
        max_response_length: Tokens after which a response is cut in validation.
        temperature: Of sampling in validation.
        loss_aggregation: How per-token losses become one number.
        samples_per_update: Samples of one optimizer step; None for all of the step's.
        lora: Low-rank adapters of the actor that are trained in place of all its weights; None for all weights.
        moe: How routers and experts of a mixture of experts are trained; None for as all weights are.
        gradient_checkpointing: Recompute activations in the backward pass to save memory.
    """

    model: str
    optimizer: Optimizer = Optimizer()
    reward: Reward | None = None
    max_response_length: int = 256
    temperature: float = 1.0
    loss_aggregation: Aggregation = "token-mean"
    samples_per_update: int | None = None
    lora: LoRA | None = None
    moe: MoE | None = None
    gradient_checkpointing: bool = False

    def configure_models(self) -> None:
        self.actor = CausalLM(
            self.model,
            optimizer=self.optimizer,
            samples_per_update=self.samples_per_update,
            lora=self.lora,
            moe=self.moe,
            gradient_checkpointing=self.gradient_checkpointing,
        )

    @node(role="actor", type="train")
    def actor_loss(self, batch: MaskedTokens) -> PerToken:
        return -self.actor.logprobs(batch)
