"""Grades of a frozen language model of the run as rewards: LLM-as-a-judge, arXiv 2306.05685; RLAIF, 2309.00267."""

from dataclasses import dataclass, field
from inspect import isfunction, signature
from typing import Any, ClassVar, Literal

import torch

from rlflow import CausalLM, PerSample, RLModule, Rollout, UserError, node
from rlflow.rewards import Rubric
from rlflow.types import Each, WithTexts

OnTooLong = Literal["raise", "zero"]


@dataclass(eq=False)
class Judged(RLModule):
    """A mixin that adds judge_coef times a frozen language model's grade of a response to its reward:

        @dataclass(eq=False)
        class JudgedGRPO(Judged, GRPO): ...

    For algorithms with a node that reads `model_scores`. The judge reads the rubric's question in the dataset's chat
    template, by the actor's tokenizer, and generates with temperature 0. A verdict without readable grades has the
    grade 0; `verdict/readable` is the share of the others, `verdict/<criterion>` the mean grade by each criterion.

    Args:
        judge: The language model that grades; it is not trained.
        rubric: Question that the judge answers, and how a grade is read from its answer.
        judge_length: The most tokens of a verdict; no more than `max_response_length`.
        judge_coef: Weight of the grade, which is from 0 to 1.
        on_too_long: Treatment of a response if the judge's question is longer than `data.max_prompt_length`. `raise`
            ends the run. `zero` does not ask the judge, and gives the response 0; `verdict/too_long` is the share of
            such responses.
    """

    judge: CausalLM | str = field(kw_only=True)
    rubric: Rubric = field(default_factory=Rubric, kw_only=True)
    judge_length: int = field(default=128, kw_only=True)
    judge_coef: float = field(default=1.0, kw_only=True)
    on_too_long: OnTooLong = field(default="raise", kw_only=True)

    learns_from_scores: ClassVar[bool] = False  # of the verifier; the judge will do

    def __post_init__(self) -> None:
        self._check_judged()
        super().__post_init__()
        if getattr(self, "reward_model", None) is not None:
            raise UserError(
                "`reward_model` and `judge` are set, and only one model gives `model_scores`; leave one out"
            )
        vars(self).pop("model_scores", None)  # which nobody else gives

    def _check_judged(self) -> None:
        """Refuse an algorithm whose loss the judge's grades would not reach, or not in full."""
        name, longest = type(self).__name__, self.max_response_length
        if hasattr(self, "greedy_model_scores"):
            raise UserError(
                f"{name} has greedy responses, which `judge` would not grade; take another algorithm, such as RLOO"
            )
        # `outcome` and `scored` are what nodes call
        methods = (getattr(type(self), each) for each in dir(type(self)) if each not in ("outcome", "scored"))
        if not any("model_scores" in signature(each).parameters for each in methods if isfunction(each)):
            raise UserError(f"no node of {name} reads `model_scores`, which `judge` gives; take one that does: GRPO")
        if self.judge_length > longest:
            raise UserError(
                f"`judge_length` is {self.judge_length}, and `max_response_length` {longest}, the most that engines"
                " write; lower the one or raise the other"
            )

    def configure_models(self) -> None:
        super().configure_models()
        self.judge.only_scores()

    @node(generates="judge")
    def verdict(self, rollout: Rollout) -> Rollout:
        asked = rollout.as_prompts(self.asked)
        rollout = self.judge.generate(asked, temperature=0.0, max_new_tokens=self.judge_length)
        return rollout

    @node
    def grades(self, verdict: WithTexts) -> PerSample:
        shares = [self.rubric.shares(text) for text in verdict.texts]
        readable = torch.tensor([bool(each) for each in shares], device=verdict.lengths.device)
        self.log("verdict/readable", readable.float())
        for criterion in self.rubric.criteria:
            given = torch.tensor([each.get(criterion, 0.0) for each in shares], device=verdict.lengths.device)
            self.log(f"verdict/{criterion}", given)
        scores = [self.rubric.score(each) if each else 0.0 for each in shares]
        return torch.tensor(scores, dtype=torch.float32, device=verdict.lengths.device)

    @node
    def model_scores(self, rollout: WithTexts, grades: Each[PerSample]) -> PerSample:
        self.log("verdict/too_long", (grades.counts == 0).float())
        return self.judge_coef * grades.mean()

    def asked(self, text: str, row: dict[str, Any]) -> list[int] | None:
        """The token ids of the judge's prompt for one response; None where the judge is not asked.

        Args:
            text: The response.
            row: The dataset's row that it answers.

        Raises:
            UserError: The prompt is longer than `data.max_prompt_length`, and `on_too_long` is `raise`.
        """
        question, longest = self.tokens(self.rubric.question(text, row)), self.longest_prompt
        if longest is None or len(question) <= longest:
            return question
        if self.on_too_long == "raise":
            raise UserError(
                f"the judge's question about a response is {len(question)} tokens long, and `data.max_prompt_length` is"
                f" {longest}, for which memory is planned; raise it, shorten `rubric.prompt` or `max_response_length`,"
                " or set `on_too_long` to zero"
            )
        return None
