"""On-policy distillation by the reverse KL: of each token, GKD, arXiv 2306.13649; or MiniLLM, arXiv 2306.08543."""

from dataclasses import dataclass, field
from typing import Literal

from rlflow import CausalLM, PerToken, node
from rlflow.functional import reinforce_returns
from rlflow.types import Tokens

from .policy_gradient import Clipped, SampledLogprobs

ReverseKL = Literal["token", "sequence"]


@dataclass(eq=False)
class OnPolicyDistillation(Clipped):
    """Trains the student on its own samples to agree with a frozen teacher; no reward, no group.

        d_t = log teacher(y_t) - log old(y_t)
        A_t = d_t                               reverse_kl: token
        A_t = d_t + d_t+1 + ... to the end      reverse_kl: sequence

    With PPO's clipped loss. `actor/teacher_kl` is the mean of -d_t over tokens.

    Args:
        teacher: The frozen model that scores the student's tokens, at the student's temperature.
        reverse_kl: The divergence whose gradient the loss descends. `token`: KL(pi || teacher) of the next token, as in
            GKD with beta 1, estimated from the sampled token. The effect of a token on later tokens is left out.
            `sequence`: KL(pi || teacher) of whole responses, as in MiniLLM's equation 2, without
            its mixed sampling and length normalization.
    """

    teacher: CausalLM | str = field(kw_only=True)
    reverse_kl: ReverseKL = "token"
    kl_penalty = None  # the teacher is all there is to learn from; `reward` is for validation

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the advantages are computed from old logprobs, and not from the engine's."""
        return self.anchor == "old"

    def configure_models(self) -> None:
        super().configure_models()
        self.teacher.only_scores(like=self.actor)  # type: ignore[arg-type]

    @node(role="teacher")
    def teacher_logprobs(self, rollout: Tokens) -> PerToken:
        return self.teacher.logprobs(rollout)

    @node
    def advantages(
        self, rollout: SampledLogprobs, teacher_logprobs: PerToken, old_logprobs: PerToken | None = None
    ) -> PerToken:
        sampled = rollout.logprobs if old_logprobs is None else old_logprobs
        closer = teacher_logprobs - sampled
        self.log("actor/teacher_kl", -closer, rollout.loss_mask)
        return closer if self.reverse_kl == "token" else reinforce_returns(closer, rollout.loss_mask, gamma=1.0)
