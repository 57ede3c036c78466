"""On-policy distillation by the reverse KL: of each token, GKD, arXiv 2306.13649; or MiniLLM, arXiv 2306.08543."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from rlflow import CausalLM, PerToken, Tokens, node
from rlflow.functional import reinforce_returns

from .policy_gradient import PolicyGradient, SampledLogprobs

ReverseKL = Literal["token", "sequence"]


@dataclass(eq=False)
class OnPolicyDistillation(PolicyGradient):
    """Advantages from d_t = log teacher(y_t) - log pi_old(y_t) on the student's samples.

    Args:
        teacher_path: Folder or hub name of the teacher, which reads the student's tokens.
        reverse_kl: Of what the gradient descends. `token`: KL(pi || teacher) of the next token at the prefixes that the
            student visits, A_t = d_t; GKD with beta 1, from the sampled token alone, and blind to how a token changes
            what comes after it. `sequence`: KL(pi || teacher) of whole responses, A_t = d_t + d_t+1 + ... to the end;
            MiniLLM's, without its mixed sampling and length normalization.
    """

    teacher_path: str = field(kw_only=True)
    reverse_kl: ReverseKL = "token"

    unused: ClassVar[tuple[str, ...]] = (
        "kl_in_reward",
        "kl_target",
        "overlong_buffer",
        "reward_model_path",
    )

    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {**PolicyGradient.choices, "reverse_kl": get_args(ReverseKL)}

    rewards = None  # the teacher is all there is to learn from; `reward` is for validation

    @property
    def needs_old_logprobs(self) -> bool:
        """The advantages are made of them, or of the engine's."""
        return self.anchor == "old"

    def configure_models(self) -> None:
        super().configure_models()
        self.teacher = CausalLM(self.teacher_path, trainable=False, temperature=self.temperature)

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
