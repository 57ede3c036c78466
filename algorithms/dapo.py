"""Decoupled clip and dynamic sampling: DAPO, arXiv 2503.14476."""

from dataclasses import dataclass

from rlflow import PerSample, Rollout, node
from rlflow.algorithms.grpo import GRPO
from rlflow.functional import group_has_signal


@dataclass(eq=False)
class DAPO(GRPO):
    """GRPO with clip-higher, token-mean and no KL, on groups whose rewards differ; others are drawn in their place.

    `overlong_buffer` is the paper's soft overlong punishment, `mask_truncated` its overlong filtering.

    Args:
        max_draws: Batches of prompts that are drawn at most to fill a step.
    """

    clip_high: float = 0.28
    max_draws: int = 10

    @node(type="filter")
    def useful(self, rollout: Rollout, rewards: PerSample) -> PerSample:
        return group_has_signal(rewards, rollout.group)
