"""On-policy distillation: GKD, arXiv 2306.13649, and MiniLLM, arXiv 2306.08543, with the reverse KL of each token."""

from dataclasses import dataclass, field
from typing import ClassVar

from rlflow import CausalLM, PerToken, Rollout, node

from .policy_gradient import PolicyGradient


@dataclass(eq=False)
class OnPolicyDistillation(PolicyGradient):
    """A_t = log teacher(y_t) - log pi_old(y_t) on the student's samples: the gradient of KL(pi || teacher).

    Args:
        teacher_path: Folder or hub name of the teacher, which reads the student's tokens.
    """

    teacher_path: str = field(kw_only=True)

    unused: ClassVar[tuple[str, ...]] = (
        "kl_in_reward",
        "kl_target",
        "overlong_buffer",
        "reward_model_path",
    )

    rewards = None  # the teacher is all there is to learn from; `reward` is for validation

    @property
    def needs_old_logprobs(self) -> bool:
        """The advantages are made of them, or of the engine's."""
        return self.anchor == "old"

    def configure_models(self) -> None:
        super().configure_models()
        self.teacher = CausalLM(self.teacher_path, trainable=False, temperature=self.temperature)

    @node(role="teacher")
    def teacher_logprobs(self, rollout: Rollout) -> PerToken:
        return self.teacher.logprobs(rollout)

    @node
    def advantages(
        self, rollout: Rollout, teacher_logprobs: PerToken, old_logprobs: PerToken | None = None
    ) -> PerToken:
        sampled = rollout.logprobs if old_logprobs is None else old_logprobs
        reverse_kl = sampled - teacher_logprobs
        self.log("actor/teacher_kl", reverse_kl, rollout.loss_mask)
        return -reverse_kl
