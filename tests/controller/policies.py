"""Modules of several policies, for tests; their generated rows are recorded by path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow import Batch, PerSample, PerToken, Rollout, node
from rlflow.functional import group_normalized_advantages
from rlflow.models.causal_lm import CausalLM
from rlflow.models.optimizer import Optimizer
from rlflow.module import RLModule
from rlflow.types import WithTexts
from tests.controller.runs import OddCharacters

QUESTIONS, ANSWERS = 2, 3  # of a prompt, of a question
STOPS = (*range(40, 60), 0)


class SelfPlay(RLModule):
    """One policy asks, the other answers; both are trained on the rewards of their own responses."""

    stop_token_ids = STOPS
    max_response_length = 8
    group_size = QUESTIONS * ANSWERS

    def __init__(self, proposer: Path, solver: Path, solver_trains: bool = True) -> None:
        sgd = Optimizer("sgd", lr=0.05, gradient_clipping=0.0)
        self.proposer = CausalLM(str(proposer), optimizer=sgd)
        self.solver = CausalLM(str(solver), solver_trains, sgd if solver_trains else None)
        self.reward = OddCharacters()
        if not solver_trains:
            self.solver_loss = None  # type: ignore[assignment,method-assign]
        self.record: dict[str, list[dict[tuple[int, ...], list[int]]]] = {"question": [], "asked": [], "answer": []}

    @node(generates="proposer")
    def question(self, batch: Batch) -> Rollout:
        rollout: Rollout = self.proposer.generate(batch, n=QUESTIONS)
        return self._recorded("question", rollout)

    @node(generates="solver")
    def answer(self, question: Rollout) -> Rollout:
        asked = question.as_prompts(self.ask)
        prompts = [row.tolist() for row in asked.prompt_ids.rows()]
        self.record["asked"].append(dict(zip(paths_of(question), prompts, strict=True)))
        rollout: Rollout = self.solver.generate(asked, n=ANSWERS, max_new_tokens=6)
        return self._recorded("answer", rollout)

    def ask(self, text: str, row: dict[str, Any]) -> list[int]:
        return self.tokens(f"{row['question']}{text}?")

    @node
    def worth(self, question: WithTexts) -> PerSample:
        return self.reward_function(question, name="worth")

    @node
    def solved(self, answer: WithTexts) -> PerSample:
        return self.reward_function(answer)

    @node
    def question_advantages(self, question: Rollout, worth: PerSample) -> PerSample:
        return group_normalized_advantages(worth, question.group)

    @node
    def answer_advantages(self, answer: Rollout, solved: PerSample, worth: PerSample) -> PerSample:
        return group_normalized_advantages(solved, answer.group) + 0 * worth  # each answer gets the `worth`

    @node(role="solver", type="train")
    def solver_loss(self, answer: Rollout, answer_advantages: PerSample) -> PerToken:
        return -self.solver.logprobs(answer) * answer_advantages[:, None]

    @node(role="proposer", type="train")
    def proposer_loss(self, question: Rollout, question_advantages: PerSample) -> PerToken:
        return -self.proposer.logprobs(question) * question_advantages[:, None]

    def _recorded(self, name: str, rollout: Rollout) -> Rollout:
        tokens: Sequence[list[int]] = rollout.response_ids.tolist()
        made = [row[:length] for row, length in zip(tokens, rollout.lengths.tolist(), strict=True)]
        self.record[name].append(dict(zip(paths_of(rollout), made, strict=True)))
        return rollout


def paths_of(rollout: Rollout) -> list[tuple[int, ...]]:
    """The path of each row."""
    return [tuple(path) for path in rollout.path.numbers.tolist()]
