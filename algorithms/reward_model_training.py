"""Training a reward model on preferences, after Bradley and Terry: InstructGPT, arXiv 2203.02155, equation 1."""

from dataclasses import dataclass

from torch import Tensor

from rlflow import Pairs, PerSample, RewardModel, RLModule, node
from rlflow.functional import bradley_terry_loss, preference_accuracy


@dataclass(eq=False)
class RewardModelTraining(RLModule):
    """-log sigmoid(r(x, y_w) - r(x, y_l)) of the chosen response y_w and the rejected one y_l.

    Validation tells the margin `r(x, y_w) - r(x, y_l)` of held-out pairs, the share of them in which it is above 0
    (at 0, a half), and the loss.

    Args:
        reward_model: The model to train. A language model gets a new head, whose scores start at 0.
    """

    reward_model: RewardModel | str

    @node(role="reward_model", type="train")
    def reward_model_loss(self, batch: Pairs) -> PerSample:
        return self.compared("reward_model", batch)

    def validation_step(self, batch: Pairs) -> None:
        self.log("val/loss", self.compared("val", batch))

    def compared(self, prefix: str, batch: Pairs) -> Tensor:
        """The loss of each pair `[B]`; logs who won, and by how much."""
        chosen, rejected = self.reward_model.scores(batch.both).tensor_split(2)
        margin = chosen - rejected
        self.log(f"{prefix}/margin", margin)
        self.log(f"{prefix}/accuracy", preference_accuracy(margin))
        return bradley_terry_loss(chosen, rejected)
