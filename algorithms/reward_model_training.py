"""Training a reward model on preferences, after Bradley and Terry: InstructGPT, arXiv 2203.02155, equation 1."""

from dataclasses import dataclass

from torch import Tensor

from rlflow import Pairs, PerSample, RewardModel, RLModule, node
from rlflow.functional import bradley_terry_loss, preference_accuracy


@dataclass(eq=False)
class RewardModelTraining(RLModule):
    """Trains a reward model on pairs of a chosen and a rejected response, after Bradley and Terry.

    -log sigmoid(r(x, y_w) - r(x, y_l)) of the chosen response y_w and the rejected one y_l.

    One loss for each pair of the dataset; scores 1.5 and 0.5 have the loss 0.313. Validation logs `val/loss`,
    `val/margin`, the mean of `r(x, y_w) - r(x, y_l)` over held-out pairs, and `val/accuracy`, the share of pairs in
    which it is above 0; a margin of exactly 0 counts one half.

    Args:
        reward_model: The model to train. A language model gets a new head, with scores that start at 0.
    """

    reward_model: RewardModel | str

    @node(role="reward_model", type="train")
    def reward_model_loss(self, batch: Pairs) -> PerSample:
        return self.compared("reward_model", batch)

    def validation_step(self, batch: Pairs) -> None:
        self.log("val/loss", self.compared("val", batch))

    def compared(self, prefix: str, batch: Pairs) -> Tensor:
        """The loss of each pair `[B]`; logs `<prefix>/margin` and `<prefix>/accuracy`."""
        chosen, rejected = self.reward_model.scores(batch.both).tensor_split(2)
        margin = chosen - rejected
        self.log(f"{prefix}/margin", margin)
        self.log(f"{prefix}/accuracy", preference_accuracy(margin))
        return bradley_terry_loss(chosen, rejected)
