"""Soft Adaptive Policy Optimization: SAPO, arXiv 2511.20347."""

from dataclasses import dataclass

from rlflow import PerSample, PerToken, UserError
from rlflow.functional import Aggregation, sapo_loss

from .grpo import GroupRelative


@dataclass(eq=False)
class SAPO(GroupRelative):
    """GRPO with a soft gate in place of the clip: a token fades as its ratio leaves 1, and none is cut off.

    Args:
        tau_pos: How sharply tokens with a positive advantage fade.
        tau_neg: The same for the others; above `tau_pos`, since their gradients spread to all other tokens.
    """

    loss_aggregation: Aggregation = "sequence-mean-token-mean"
    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tau_pos", "tau_neg"):
            if not getattr(self, name) > 0:
                raise UserError(f"`{name}` is {getattr(self, name)}; give more than 0")

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerSample, mask: PerToken) -> PerToken:
        return sapo_loss(logprobs, old_logprobs, advantages, self.tau_pos, self.tau_neg)
