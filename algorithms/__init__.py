"""The algorithms, one class per file."""

from rlflow.algorithms.grpo import GRPO
from rlflow.algorithms.sft import SFT

__all__ = ["GRPO", "SFT"]
