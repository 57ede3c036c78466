"""Self-play of two policies, an asker and an answerer: R-Zero, arXiv 2508.05004, with a checker."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rlflow import Batch, CausalLM, PerSample, PerToken, RLModule, Rollout, UserError, node
from rlflow.functional import Aggregation, group_normalized_advantages
from rlflow.rewards import RewardLike
from rlflow.types import Each, Grouped, TokensWithLossMask, WithTexts


@dataclass(eq=False)
class SelfPlay(RLModule):
    """A proposer asks questions that a solver answers; a question is worth most if half of its answers are right.

        p        = mean reward of the answers to a question
        worth    = 1 - 2 |p - 1/2|                                  0 for p = 0 and p = 1, 1 for p = 1/2
        A_asked  = (worth - mean of the prompt's questions) / std
        A_answer = (reward - mean of the question's answers) / std
        loss_t   = -A log pi(y_t)                                   of each policy on its own tokens

    Both policies are trained in every step. R-Zero takes the solver's majority for the truth; here the reward checks,
    so a question that nobody can solve, or a text that is not a question, is worth nothing.

    Args:
        solver: The policy that answers questions; in validation it answers the dataset's prompts.
        proposer: The policy that asks questions.
        reward: The reward function that scores an answer, from 0 to 1, by the question in the row's `column`.
        ask: Template of the proposer's prompt: `{prompt}` is the dataset's prompt, and other names are columns of its
            row.
        column: The column of the row in which the reward finds the question; dots step into a column.
        questions: Questions to each prompt, at least 2.
        answers: Answers to each question, at least 2.
        max_response_length: Tokens after which a question or an answer is cut.
        loss_aggregation: Reduction of per-token losses to one number.
    """

    solver: CausalLM | str
    proposer: CausalLM | str
    reward: RewardLike
    ask: str = "{prompt}"
    column: str = "question"
    questions: int = 4
    answers: int = 8
    max_response_length: int = 256
    loss_aggregation: Aggregation = "token-mean"

    unclipped: ClassVar[bool] = True
    writes_prompts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, count in {"questions": self.questions, "answers": self.answers}.items():
            if count < 2:
                raise UserError(f"`{name}` is {count}; group-relative advantages need at least 2. Raise it")
        self.group_size = self.questions * self.answers

    @node(generates="proposer")
    def question(self, batch: Batch) -> Rollout:
        prompts = replace(batch, prompt_ids=self.prompts(batch.rows, self.ask))
        rollout: Rollout = self.proposer.generate(prompts, n=self.questions)
        return rollout

    @node(generates="solver")
    def answer(self, question: Rollout) -> Rollout:
        prompts = question.as_prompts(lambda text, row: self.tokens(text or "?"))
        posed = [_with(row, self.column, text) for row, text in zip(question.rows, question.texts, strict=True)]
        rollout: Rollout = self.solver.generate(replace(prompts, rows=posed), n=self.answers)
        return rollout

    @node
    def solved(self, answer: WithTexts) -> PerSample:
        return self.reward_function(answer)

    @node
    def worth(self, question: Grouped, solved: Each[PerSample]) -> PerSample:
        worth = 1 - (2 * solved.mean() - 1).abs()
        self.log("proposer/worth", worth)
        return worth

    @node
    def question_advantages(self, question: Grouped, worth: PerSample) -> PerSample:
        return group_normalized_advantages(worth, question.group)

    @node
    def answer_advantages(self, answer: Grouped, solved: PerSample) -> PerSample:
        return group_normalized_advantages(solved, answer.group)

    @node(role="proposer", type="train")
    def proposer_loss(self, question: TokensWithLossMask, question_advantages: PerSample) -> PerToken:
        return -question_advantages[:, None] * self.proposer.logprobs(question)

    @node(role="solver", type="train")
    def solver_loss(self, answer: TokensWithLossMask, answer_advantages: PerSample) -> PerToken:
        return -answer_advantages[:, None] * self.solver.logprobs(answer)


def _with(row: dict[str, Any], path: str, text: str) -> dict[str, Any]:
    """A copy of the row with `text` in the column `path`: `a.b` is `b` within `a`, unless a column is called `a.b`."""
    first, _, rest = path.partition(".")
    if path in row or not rest:
        return {**row, path: text}
    within = row.get(first, {})
    if not isinstance(within, dict):
        raise UserError(
            f"`column` steps by `{path}` into `{first}`, which is {within!r:.60} in a row, and no columns; name the"
            " column that the reward reads the question from"
        )
    return {**row, first: _with(within, rest, text)}
