"""Score Centering Stabilizes Off-policy Reinforcement Learning: arXiv 2609.20807."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from rlflow import PerSample, PerToken, UserError, node
from rlflow.functional import broadcast_to_tokens, expected_logprobs, group_normalized_advantages, policy_objective
from rlflow.types import Grouped, Sampled

from .policy_gradient import GroupBaseline, PolicyGradient, Scored


class SampledFromSome(Sampled, Protocol):
    """Samples, with the engine's log-probability of each token that it could have sampled."""

    sampler_logprobs: Tensor  # [B, T, K]


@dataclass(eq=False)
class ScoreCentering(GroupBaseline, PolicyGradient, Scored):
    """The plain policy gradient without its drift towards an engine whose probabilities q differ from the trainer's p.

        loss_t = -A_i (sg(w_t) log p_t - sum_v sg(q_v w_v) log p_v),    A_i = r_i - mean_g

    Where q samples, the expected gradient of `w log p` is not 0, whatever the rewards are; the sum takes it off. It is
    over the tokens that the engine sampled from, so `actor.top_k` is needed, 128 say: over these it is exact. (The
    paper samples from all tokens, and estimates what is beyond the likeliest ones.) w = min(p / q, 2) by default, the
    paper's TIS+SC; `importance: null` is its SC.
    """

    sums_over_support: ClassVar[bool] = True  # so every dataset's `sampling` needs `top_k`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.actor.top_k is None:
            raise UserError(
                "`top_k` of `actor` is not set, and score centering sums over the tokens that were sampled from; set"
                " it, such as 128"
            )
        if self.importance is not None and self.importance.level != "token":
            raise UserError(f"`importance.level` is {self.importance.level!r}, and scores are of tokens; set `token`")

    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        return group_normalized_advantages(rewards, rollout.group, normalize_std=False, episode=rollout.episode)

    @node(role="actor", type="train")
    def actor_loss(
        self,
        rollout: SampledFromSome,
        advantages: PerSample,
        old_logprobs: PerToken | None = None,
        ref_logprobs: PerToken | None = None,
    ) -> PerToken:
        logprobs, entropy, of_each = self.actor.score_support(rollout)
        old, A = self.anchored(rollout, logprobs, old_logprobs), broadcast_to_tokens(advantages, logprobs)
        settings = rollout.loss_mask, self.log, self.importance, self.kl, self.entropy_coef
        loss = policy_objective(-A * logprobs, logprobs, entropy, old, rollout.logprobs, ref_logprobs, *settings)
        return loss + A * expected_logprobs(of_each, rollout.sampler_logprobs, self.importance)
