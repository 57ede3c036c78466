"""Decoupled clip and dynamic sampling: DAPO, arXiv 2503.14476."""

from dataclasses import dataclass

from rlflow import PerSample, node
from rlflow.functional import Clip, group_has_signal
from rlflow.types import Grouped, WithTexts

from .grpo import GRPO
from .policy_gradient import WithTurns


@dataclass(eq=False)
class DAPO(GRPO):
    """GRPO with clip-higher, the token-mean loss and a length penalty, on groups whose scores are not all equal.

        0 < right answers of the group < group_size, or it is dropped             equation 11, the node `useful`
        surrogate_t = -min(r_t A_i, clip(r_t, 1 - clip.low, 1 + clip.high) A_i)   clip.low = 0.2, clip.high = 0.28
        reward_i = score_i + clip((L - overlong_buffer - length_i) / overlong_buffer, -1, 0)         equation 13

    L is `max_response_length`. While a step lacks groups, the next batch of prompts is drawn, sampled and scored;
    surplus groups open the next step. Whether a group is dropped follows from its scores, before the length penalty:
    equation 11 asks for right and wrong answers, not for long and short ones.

    `overlong_buffer` is the paper's soft overlong punishment, over the last fifth of the length as there (4,096 of
    20,480 tokens), `mask_truncated` its overlong filtering.

    Args:
        max_draws: The most batches of prompts that are drawn to fill a step.
    """

    clip: Clip = Clip(high=0.28)
    overlong_buffer: int | float | None = 0.2
    max_draws: int = 10

    kl_penalty = None

    @node
    def scores(self, rollout: WithTexts, model_scores: PerSample | None = None) -> PerSample:
        return self.scored(rollout, model_scores)

    @node
    def rewards(self, rollout: WithTurns, scores: PerSample) -> PerSample:
        return self.credited(rollout, self.shaped(rollout.policy_lengths, scores))

    @node(type="filter")
    def useful(self, rollout: Grouped, scores: PerSample) -> PerSample:
        return group_has_signal(scores, rollout.group)
