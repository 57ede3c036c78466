"""Dr. GRPO, GRPO done right: Understanding R1-Zero-Like Training, arXiv 2503.20783."""

from dataclasses import dataclass

from rlflow.functional import Aggregation

from .grpo import GRPO


@dataclass(eq=False)
class DrGRPO(GRPO):
    """A_i = r_i - mean_g, and every response's loss divided by the longest length allowed, not by its own.

        loss = sum_it loss_it / (max_response_length N)

    N counts all responses, also those that `mask_truncated` leaves out. GRPO with two other defaults: so neither
    prompts whose rewards hardly differ nor short responses weigh more.
    """

    normalize_std: bool = False
    loss_aggregation: Aggregation = "constant"
