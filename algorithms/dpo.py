"""Direct Preference Optimization: arXiv 2305.18290."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow import CausalLM, LoRA, MoE, Optimizer, Pairs, PerSample, RLModule, UserError, node
from rlflow.functional import dpo_loss, preference_accuracy


@dataclass(eq=False)
class DPO(RLModule):
    """-log sigmoid(beta h), h = log pi(y_w|x)/ref(y_w|x) - log pi(y_l|x)/ref(y_l|x) of the chosen y_w, rejected y_l.

    Validation tells the margin `beta h` of held-out pairs, and the share of them in which it is above 0 (at 0, a half).

    Args:
        model: Folder or hub name of the model to train, or `tiny` for the embedded one.
        beta: Weight of the divergence from the reference.
        reference_path: Folder or hub name of the reference; None for the model as it is before training. To validate
            a trained model, name what it started from.
        optimizer: Of the actor.
        epochs: Passes over a step's pairs.
        samples_per_update: Pairs of one optimizer step; None for all of the step's.
        lora: Low-rank adapters of the actor that are trained in place of all its weights; None for all weights.
        moe: How routers and experts of a mixture of experts are trained; None for as all weights are.
        gradient_checkpointing: Recompute activations in the backward pass to save memory.
    """

    model: str
    beta: float = 0.1
    reference_path: str | None = None
    optimizer: Optimizer = Optimizer()
    epochs: int = 1
    samples_per_update: int | None = None
    lora: LoRA | None = None
    moe: MoE | None = None
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise UserError(f"`beta` is {self.beta}; give more than 0, or nothing tells chosen from rejected responses")

    def configure_models(self) -> None:
        self.actor = CausalLM(
            self.model,
            optimizer=self.optimizer,
            epochs=self.epochs,
            samples_per_update=self.samples_per_update,
            lora=self.lora,
            moe=self.moe,
            gradient_checkpointing=self.gradient_checkpointing,
        )
        if self.lora is not None and self.reference_path is None:
            self.reference: CausalLM = self.actor.without_adapters()
        else:
            self.reference = CausalLM(self.reference_path or self.model, trainable=False)

    @node(role="reference")
    def ref_logprobs(self, batch: Pairs) -> PerSample:
        return response_logprobs(self.reference, batch)  # [B, 2]

    @node(role="actor", type="train")
    def actor_loss(self, batch: Pairs, ref_logprobs: PerSample) -> PerSample:
        logprobs = response_logprobs(self.actor, batch)
        chosen, rejected = logprobs.unbind(dim=1)
        ref_chosen, ref_rejected = ref_logprobs.unbind(dim=1)
        margin = self.margin(logprobs.detach(), ref_logprobs)
        self.log("actor/margin", margin)
        self.log("actor/accuracy", preference_accuracy(margin))
        self.log("actor/chosen_logprobs", chosen)
        self.log("actor/rejected_logprobs", rejected)
        return dpo_loss(chosen, rejected, ref_chosen, ref_rejected, self.beta)

    def validation_step(self, batch: Pairs) -> None:
        margin = self.margin(response_logprobs(self.actor, batch), response_logprobs(self.reference, batch))
        self.log("val/margin", margin)
        self.log("val/accuracy", preference_accuracy(margin))

    def margin(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """By how much the implicit reward of the chosen response is above the rejected one's, `[B]`."""
        chosen, rejected = (logprobs - ref_logprobs).unbind(dim=1)
        return self.beta * (chosen - rejected)


def response_logprobs(model: CausalLM, batch: Pairs) -> Tensor:
    """`[B, 2]`: log-probabilities of the chosen and of the rejected response of each pair, summed over tokens."""
    return torch.stack(model.logprobs(batch.both).sum(dim=1).tensor_split(2), dim=1)
