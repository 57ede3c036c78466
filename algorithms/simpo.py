"""Simple Preference Optimization: arXiv 2405.14734."""

from dataclasses import dataclass

from rlflow import CausalLM, Pairs, PerSample, RLModule, UserError, node
from rlflow.functional import preference_accuracy, simpo_loss

from .dpo import summed


@dataclass(eq=False)
class SimPO(RLModule):
    """Simple Preference Optimization: trains on pairs of a chosen and a rejected response.

    -log sigmoid(beta (log pi(y_w|x) / |y_w| - log pi(y_l|x) / |y_l|) - gamma); there is no reference.

    Equation 6, one loss for each pair of the dataset: log-probabilities are means over a response's tokens. Training
    and validation log `margin`, the mean before gamma is subtracted, and `accuracy`, the share of pairs in which
    it is above 0.

    Args:
        actor: The model to train.
        beta: Scale of the mean log-probabilities, above 0.
        gamma: Margin by which the chosen response should be ahead.
    """

    actor: CausalLM | str
    beta: float = 2.0
    gamma: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0:
            raise UserError(f"`beta` is {self.beta}; give more than 0, or chosen and rejected responses count alike")

    @node(role="actor", type="train")
    def actor_loss(self, batch: Pairs) -> PerSample:
        return self.compared("actor", batch)

    def validation_step(self, batch: Pairs) -> None:
        self.compared("val", batch)

    def compared(self, prefix: str, batch: Pairs) -> PerSample:
        """The loss of each pair `[B]`; logs `<prefix>/margin` and `<prefix>/accuracy`."""
        both = batch.both
        chosen, rejected = (summed(self.actor.logprobs(both)) / summed(both.lengths[:, None])).unbind(dim=1)
        margin = self.beta * (chosen - rejected).detach()
        self.log(f"{prefix}/margin", margin)
        self.log(f"{prefix}/accuracy", preference_accuracy(margin))
        return simpo_loss(chosen, rejected, self.beta, self.gamma)
