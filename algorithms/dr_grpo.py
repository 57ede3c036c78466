"""Dr. GRPO, GRPO done right: Understanding R1-Zero-Like Training, arXiv 2503.20783."""

from dataclasses import dataclass

from rlflow.functional import Aggregation

from .grpo import GRPO


@dataclass(eq=False)
class DrGRPO(GRPO):
    """A_i = r_i - mean_g, and every response's loss divided by the longest length allowed, not by its own."""

    normalize_std: bool = False
    loss_aggregation: Aggregation = "constant"
