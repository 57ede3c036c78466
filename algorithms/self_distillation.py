"""On-policy self-distillation: OPSD, arXiv 2601.18734, with the moving-average teacher of SDFT, arXiv 2601.19897."""

from dataclasses import dataclass
from typing import ClassVar

from rlflow import Batch, CausalLM, PerToken, RLModule, Rollout, node
from rlflow.functional import Aggregation
from rlflow.rewards import RewardLike
from rlflow.types import Ragged, TokensWithLossMask, WithDatasetRows


@dataclass(eq=False)
class SelfDistillation(RLModule):
    """loss_t = KL(pi(. | x, y_<t) || teacher(. | hint of x, y_<t)), over the whole vocabulary, on samples of pi.

        teacher = decay teacher + (1 - decay) pi        after each step

    The teacher is a moving average of the policy that has read a hint, such as the solution, in place of the prompt. No
    gradient flows to it, and no reward is needed.

    Args:
        actor: The policy.
        hint: Template that the teacher reads in place of the prompt: `{prompt}` is the prompt, and other names are
            columns of the dataset's row.
        decay: Decay of the teacher's average per step, from 0 to below 1; 0 is the policy of the step before.
        group_size: Responses to each prompt.
        max_response_length: Tokens after which a response is cut.
        loss_aggregation: Reduction of per-token losses to one number.
        reward: The reward function that scores responses in validation; None for no validation.
    """

    actor: CausalLM | str
    hint: str = "{prompt} The answer is {answer}."
    decay: float = 0.99
    group_size: int = 1
    max_response_length: int = 256
    loss_aggregation: Aggregation = "token-mean"
    reward: RewardLike | None = None

    writes_prompts: ClassVar[bool] = True

    def configure_models(self) -> None:
        self.teacher = self.actor.averaged(self.decay)

    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        return self.generate(batch, self.group_size)

    @node
    def hinted(self, batch: WithDatasetRows) -> Ragged:
        return self.prompts(batch.rows, self.hint)

    @node(role="actor", type="train", uses="teacher")
    def actor_loss(self, rollout: TokensWithLossMask, hinted: Ragged) -> PerToken:
        kl = self.actor.kl(rollout, self.teacher, given=hinted)
        self.log("actor/teacher_kl", kl.detach(), rollout.loss_mask)
        return kl
