"""Direct Preference Optimization: arXiv 2305.18290."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow import CausalLM, Pairs, PerSample, RLModule, UserError, node
from rlflow.functional import dpo_loss, preference_accuracy


@dataclass(eq=False)
class DPO(RLModule):
    """Direct Preference Optimization: trains on pairs of a chosen and a rejected response, without sampling.

    -log sigmoid(beta h), h = log pi(y_w|x)/ref(y_w|x) - log pi(y_l|x)/ref(y_l|x) of the chosen y_w, rejected y_l.

    Equation 7, one loss for each pair of the dataset; log-probabilities are summed over a response's tokens. A
    pair whose two log ratios are 0.5 and -1.5 has `beta h` = 0.2 at the default beta, and the loss 0.598.

    Validation logs `val/margin`, the mean of `beta h` over held-out pairs, and `val/accuracy`, the share of pairs in
    which it is above 0; a margin of exactly 0 counts one half.

    Args:
        actor: The model to train.
        beta: Weight of the divergence from the reference, above 0. The larger it is, the nearer the policy stays to it.
        reference: The frozen model in the denominator of log ratios; None for the actor's initial weights. To validate
            a trained model, name the model from which its training started.
    """

    actor: CausalLM | str
    beta: float = 0.1
    reference: CausalLM | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0:
            raise UserError(f"`beta` is {self.beta}; give more than 0, or chosen and rejected responses count alike")

    def configure_models(self) -> None:
        if self.reference is None:
            self.reference = self.actor.initial()
        else:
            self.reference.only_scores(like=self.actor)  # type: ignore[arg-type]

    @node(role="reference")
    def ref_logprobs(self, batch: Pairs) -> PerSample:
        return summed(self.reference.logprobs(batch.both))  # [B, 2]

    @node(role="actor", type="train")
    def actor_loss(self, batch: Pairs, ref_logprobs: PerSample) -> PerSample:
        logprobs = summed(self.actor.logprobs(batch.both))
        chosen, rejected = logprobs.unbind(dim=1)
        ref_chosen, ref_rejected = ref_logprobs.unbind(dim=1)
        margin = self.margin(logprobs.detach(), ref_logprobs)
        self.log("actor/margin", margin)
        self.log("actor/accuracy", preference_accuracy(margin))
        self.log("actor/chosen_logprobs", chosen)
        self.log("actor/rejected_logprobs", rejected)
        return dpo_loss(chosen, rejected, ref_chosen, ref_rejected, self.beta)

    def validation_step(self, batch: Pairs) -> None:
        both = batch.both
        margin = self.margin(summed(self.actor.logprobs(both)), summed(self.reference.logprobs(both)))
        self.log("val/margin", margin)
        self.log("val/accuracy", preference_accuracy(margin))

    def margin(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """`beta h` of each pair, `[B]`: how far the implicit reward of the chosen response is above the rejected one's.

        Args:
            logprobs: `[B, 2]` of the actor, from `summed`: of the chosen response, then of the rejected one.
            ref_logprobs: `[B, 2]` of the reference.
        """
        chosen, rejected = (logprobs - ref_logprobs).unbind(dim=1)
        return self.beta * (chosen - rejected)


def summed(logprobs: Tensor) -> Tensor:
    """`[B, 2]`, the log-probability of the chosen and of the rejected response of each pair.

    Args:
        logprobs: `[2B, T]` of the rows of `Pairs.both`: the chosen responses of all pairs, then the rejected ones.
    """
    return torch.stack(logprobs.sum(dim=1).tensor_split(2), dim=1)
