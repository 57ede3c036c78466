"""Decoupled clip and dynamic sampling: DAPO, arXiv 2503.14476."""

from dataclasses import dataclass

from rlflow import PerSample, node
from rlflow.functional import Clip, group_has_signal
from rlflow.types import Grouped, Written

from .grpo import GRPO
from .policy_gradient import Earned


@dataclass(eq=False)
class DAPO(GRPO):
    """GRPO with clip-higher, token-mean and no KL, on groups whose scores differ; others are drawn in their place.

    `overlong_buffer` is the paper's soft overlong punishment, over the last fifth of the length as there (4,096 of
    20,480 tokens), `mask_truncated` its overlong filtering. The punishment keeps no group: equation 11 asks for right
    and wrong answers, not for long and short ones.

    Args:
        max_draws: Batches of prompts that are drawn at most to fill a step.
    """

    clip: Clip = Clip(high=0.28)
    overlong_buffer: int | float | None = 0.2
    max_draws: int = 10

    kl_penalty = None

    @node
    def scores(self, rollout: Written, model_scores: PerSample | None = None) -> PerSample:
        return self.scored(rollout, model_scores)

    @node
    def rewards(self, rollout: Earned, scores: PerSample) -> PerSample:
        return self.credited(rollout, self.shaped(rollout.policy_lengths, scores))

    @node(type="filter")
    def useful(self, rollout: Grouped, scores: PerSample) -> PerSample:
        return group_has_signal(scores, rollout.group)
