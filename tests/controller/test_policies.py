"""Several policies in one run: each generates with its own weights, and is trained on what it generated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rlflow.models.tiny import write_tiny_model
from tests.controller.policies import ANSWERS, QUESTIONS, SelfPlay
from tests.controller.runs import ZERO2, Fit, Result, fit, sums
from tests.ranks import RankPool

PROMPTS, STEPS = 3, 2
Tokens = Mapping[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of other weights and width than `policy`."""
    folder = tmp_path_factory.mktemp("solver") / "solver"
    return write_tiny_model(folder, seed=2, hidden_size=64, intermediate_size=96, layers=2, max_position=256)


@pytest.fixture(scope="module")
def alone(policy: Path, other: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("alone")
    return fit(Fit(SelfPlay(policy, other), sums(12, PROMPTS), folder / "run", settings={"max_steps": STEPS}))


def tokens(results: list[Result], name: str) -> list[dict[tuple[int, ...], list[int]]]:
    """What was generated in each step, by path, over all ranks."""
    steps = zip(*(result.record[name] for result in results), strict=True)
    return [{path: row for of_rank in step for path, row in of_rank.items()} for step in steps]


def test_answers_are_rows_below_questions_and_questions_below_prompts(alone: Result) -> None:
    for step in range(STEPS):
        prompts = range(step * PROMPTS, (step + 1) * PROMPTS)
        questions = [(prompt, question) for prompt in prompts for question in range(QUESTIONS)]
        assert list(alone.record["question"][step]) == questions
        assert list(alone.record["answer"][step]) == [
            (*path, answer) for path in questions for answer in range(ANSWERS)
        ]


def test_both_policies_are_trained_and_each_is_compared_with_its_own_engine(alone: Result) -> None:
    for step in alone.steps:
        assert step["proposer/grad_norm"] > 0
        assert step["solver/grad_norm"] > 0
        for policy in ("proposer", "solver"):
            assert 0 < step[f"sync/logprob_gap/{policy}"] < 1e-5
        assert step["answer/tokens"] > step["question/tokens"] > 0


def test_the_same_tokens_are_generated_on_two_ranks(
    alone: Result, policy: Path, other: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    run = Fit(SelfPlay(policy, other), sums(12, PROMPTS), tmp_path / "run", ZERO2, settings={"max_steps": STEPS})
    both = ranks2.run(fit, run, timeout_s=300)
    for name in ("question", "answer"):
        assert tokens(both, name) == tokens([alone], name)
    for step, expected in zip(both[0].steps, alone.steps, strict=True):
        for name in ("proposer/loss", "solver/loss", "reward/mean", "worth/mean"):
            assert step[name] == pytest.approx(expected[name], abs=1e-5)
