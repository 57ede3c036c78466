"""Soft Adaptive Policy Optimization: SAPO, arXiv 2511.20347."""

from dataclasses import dataclass

from rlflow import PerSample, PerToken, UserError
from rlflow.functional import Aggregation, sapo_loss

from .grpo import GroupRelative


@dataclass(eq=False)
class SAPO(GroupRelative):
    """GRPO with a soft gate in place of the clip: it falls smoothly as a token's ratio moves away from 1.

        surrogate_t = -sigmoid(tau (r_t - 1)) 4 / tau A_i,    tau = tau_pos where A_i > 0, else tau_neg

    Equations 5 and 6, with r_t = pi_t / old_t. The gradient of log pi_t has the weight 4 p (1 - p) r_t A_i with
    p = sigmoid(tau (r_t - 1)). The gate is 4 p (1 - p), which is 1 at a ratio of 1.

    Args:
        tau_pos: Temperature of tokens with a positive advantage: how sharply their gate falls.
        tau_neg: Temperature of the other tokens; above `tau_pos`, since their gradients spread to all other tokens.
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
