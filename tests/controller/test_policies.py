"""Several policies in one run: each generates with its own weights, and is trained on what it generated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow import Batch, Rollout, node
from rlflow.errors import UserError
from rlflow.models.causal_lm import stored_weights
from rlflow.models.tiny import write_tiny_model
from rlflow.rollout.assignment import Share
from rlflow.rollout.engine import Completion, RankInfo, Sampling, SyncReport
from rlflow.rollout.sampling import sampling_seed
from rlflow.rollout.transformers import TransformersEngine
from tests.controller.policies import ANSWERS, QUESTIONS, STOPS, SelfPlay, paths_of
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
def alike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the architecture of `policy` and other weights."""
    folder = tmp_path_factory.mktemp("alike") / "solver"
    return write_tiny_model(folder, seed=3, hidden_size=128, intermediate_size=96, layers=2, max_position=256)


@pytest.fixture(scope="module")
def alone(policy: Path, other: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("alone")
    return fit(Fit(SelfPlay(policy, other), sums(12, PROMPTS), folder / "run", settings={"max_steps": STEPS}))


def tokens(results: list[Result], name: str) -> list[dict[tuple[int, ...], list[int]]]:
    """The tokens generated in each step, by path, over all ranks."""
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


class CountsLoads(TransformersEngine):
    """Counts how often it is given weights and sleeps; generates awake only."""

    loads = sleeps = 0
    asleep = False

    def update_weights(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        self.loads += 1
        return super().update_weights(buckets, version)

    def sleep(self, keep_weights: bool = False) -> None:
        self.sleeps, self.asleep = self.sleeps + 1, True
        super().sleep(keep_weights)

    def wake_up(self) -> None:
        self.asleep = False

    def generate(self, *asked: Any) -> list[Completion]:
        assert not self.asleep
        return super().generate(*asked)


def test_a_frozen_policy_generates_with_the_weights_of_its_files_read_once(
    policy: Path, other: Path, tmp_path: Path
) -> None:
    module, solver, proposer = SelfPlay(policy, other, solver_trains=False), CountsLoads(), CountsLoads()
    settings = {"max_steps": STEPS, "engines": {"solver": solver, "proposer": proposer}}
    found = fit(Fit(module, sums(12, PROMPTS), tmp_path / "run", settings=settings))
    assert (solver.loads, proposer.loads) == (1, STEPS)
    assert solver.sleeps == proposer.sleeps > STEPS  # each after it was set up, and in every step
    engine = TransformersEngine()
    engine.setup(str(other), RankInfo(torch.float32, torch.device("cpu")))
    engine.update_weights(stored_weights(other, torch.float32, 2**20), 0)
    for step in range(STEPS):
        for path, answer in found.record["answer"][step].items():
            *question, child = path
            prompt = found.record["asked"][step][tuple(question)]
            seed = sampling_seed(0, step, "answer", question, child)
            (expected,) = engine.generate([prompt], [seed], Sampling(6, 1.0, STOPS), 0)
            assert list(expected.token_ids) == answer
    assert "sync/logprob_gap/solver" not in found.steps[0]


def test_policies_take_turns_in_one_engine(policy: Path, alike: Path, tmp_path: Path) -> None:
    def run(name: str, **settings: Any) -> Result:
        module = SelfPlay(policy, alike)
        return fit(Fit(module, sums(12, PROMPTS), tmp_path / name, settings={"max_steps": STEPS, **settings}))

    apart, shared = run("apart"), run("shared", engines={"solver": Share("proposer")})
    assert tokens([shared], "answer") == tokens([apart], "answer")
    assert tokens([shared], "question") == tokens([apart], "question")


class Twice(SelfPlay):
    """Asks the same prompts twice in one node, and returns all questions as rows of one space."""

    @node(generates="proposer")
    def question(self, batch: Batch) -> Rollout:
        first, again = (self.proposer.generate(batch, n=1) for _ in range(2))
        self.record["question"] += [{}, {}]
        for number, rollout in enumerate((first, again)):
            rows = zip(paths_of(rollout), rollout.response_ids.tolist(), strict=True)
            self.record["question"][number] = dict(rows)
        joined: Rollout = first.concat(again)
        return joined


def test_a_second_call_on_the_same_rows_is_new_and_returned_rows_are_renumbered(
    policy: Path, other: Path, tmp_path: Path
) -> None:
    found = fit(Fit(Twice(policy, other), sums(12, PROMPTS), tmp_path / "run"))
    first, again = found.record["question"]
    assert [(*parent, child + 1) for *parent, child in first] == list(again)  # a prompt's children are numbered on
    assert all(first[path] != question for path, question in zip(first, again.values(), strict=True))
    answers = [path[:2] for path in found.record["answer"][0]]
    assert sorted(set(answers)) == [(prompt, question) for prompt in range(PROMPTS) for question in range(QUESTIONS)]


class Unmarked(SelfPlay):
    @node(generates="solver")
    def answer(self, question: Rollout) -> Rollout:
        rollout: Rollout = self.proposer.generate(question.as_prompts(self.ask))
        return rollout


class Orphans(SelfPlay):
    @node(generates="solver")
    def answer(self, question: Rollout) -> Rollout:
        rollout: Rollout = self.solver.generate(question.as_prompts(self.ask))
        return replace(rollout, path=replace(rollout.path, numbers=rollout.path.numbers + 7))


class FromResponses(SelfPlay):
    @node(generates="solver")
    def answer(self, question: Rollout) -> Rollout:
        rollout: Rollout = self.solver.generate(question)
        return rollout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (
            Unmarked,
            r"node `answer` calls `self.proposer.generate` and is marked to generate with 'solver'; add 'proposer' to"
            r" its `generates` \(.*test_policies.py:\d+\)",
        ),
        (
            Orphans,
            r"row 0 that node `answer` returned on rank 0 has the parent 7.7, which is not a row of `question` that it"
            r" reads there .*; return rows that were made from those it reads",
        ),
        (
            FromResponses,
            "node `answer` continues rows of `question`, which proposer wrote, with `solver`, and log-probabilities of"
            " a row are of one policy; continue them with the policy that wrote them, or make prompts of them by"
            " `as_prompts`",
        ),
    ],
)
def test_what_a_node_cannot_generate_is_refused_in_one_line(
    module: type[SelfPlay], line: str, policy: Path, other: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        fit(Fit(module(policy, other), sums(12, PROMPTS), tmp_path / "run"))
    assert re.fullmatch(line, str(refused.value)), str(refused.value)
