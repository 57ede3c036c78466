"""Algorithms whose rows make rows: two steps in float64 equal plain transformers over the samples, row by row.

The references know the papers' equations and which row came of which, and nothing of masks, spaces and exchanges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow import CausalLM, Optimizer, RLModule, Rollout
from rlflow.algorithms import RAFT, SelfPlay, TreeRL
from rlflow.models.tiny import write_tiny_model
from rlflow.rewards import SampleReward
from rlflow.strategies import SingleProcess
from rlflow.testing.derivative import wide_casts
from tests.controller.runs import FSDP, Fit, Result, fit, sums
from tests.ranks import RankPool

LR, STEPS, PROMPTS = 0.3, 2, 3
LONGEST, STOPS = 9, tuple(range(40, 56))
SGD = Optimizer("sgd", lr=LR, gradient_clipping=0.0)


class Row(NamedTuple):
    """A generated row, and the path of the row that it was generated from."""

    parent: tuple[int, ...]
    path: tuple[int, ...]
    prompt: list[int]
    response: list[int]
    text: str


class OddShare(SampleReward):
    """The share of characters of odd code."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return worth(text)


class OddMajority(SampleReward):
    """Whether most characters are of odd code, so that all responses to a prompt may be worth the same."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return float(worth(text) > 0.5)


def worth(text: str) -> float:
    return sum(ord(character) % 2 for character in text) / max(1, len(text))


class Recorded:
    """Records the rows of each call of `generate`, in their order."""

    record: list[list[Row]]

    def _generate(self, *arguments: Any) -> Rollout:
        rollout: Rollout = super()._generate(*arguments)  # type: ignore[misc]
        lengths, texts, paths = rollout.lengths.tolist(), rollout.texts, rollout.path.numbers.tolist()
        rows = zip(rollout.prompt_ids.rows(), rollout.response_ids.tolist(), lengths, texts, paths, strict=True)
        self.record.append(
            [Row(tuple(path[:-1]), tuple(path), ids.tolist(), made[:n], text) for ids, made, n, text, path in rows]
        )
        return rollout


class RecordedTree(Recorded, TreeRL):
    pass


class RecordedRAFT(Recorded, RAFT):
    stop_token_ids = STOPS


class RecordedPlay(Recorded, SelfPlay):
    stop_token_ids = STOPS


class Policy:
    """Plain transformers in float64, trained by plain SGD."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    def logprobs(self, row: Row) -> Tensor:
        ids = torch.tensor([[*row.prompt, *row.response]])
        said = self.model(ids).logits[0, len(row.prompt) - 1 : -1].log_softmax(-1)
        found: Tensor = said.gather(1, ids[0, len(row.prompt) :, None])[:, 0]
        return found

    def update(self, weighted: Sequence[tuple[Row, Tensor, slice]]) -> float:
        """One step on the mean over all tokens of -weight log pi: of each row its weights `[T]`, and which tokens."""
        terms = [-(weights * self.logprobs(row))[tokens] for row, weights, tokens in weighted]
        loss = torch.cat(terms).mean()
        self.model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in self.model.parameters():
                weight -= LR * weight.grad
        return float(loss.detach())


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def tree_step(
    policies: dict[str, Policy], record: list[list[Row]], trunk_tokens: int | None = None
) -> dict[str, float]:
    """TreeRL, section 3.2: V of a trunk is the mean of its leaves, that of a prompt the mean of its trunks' V.

    Global and local advantage are added.
    """
    trunks, whole, branches = record
    leaves: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in (*whole, *branches):
        leaves[row.parent].append(row)
    of_prompt: dict[int, list[float]] = defaultdict(list)
    for parent, rows in leaves.items():
        of_prompt[parent[0]].append(mean([worth(row.text) for row in rows]))
    weighted = []
    for trunk in trunks:
        fork = len(trunk.response) if trunk_tokens else int(policies["actor"].logprobs(trunk).argmin())
        rows, root = leaves[trunk.path], mean(of_prompt[trunk.path[0]])
        value = mean([worth(row.text) for row in rows])
        assert [row.response[:fork] for row in rows] == [trunk.response[:fork]] * len(rows)
        assert rows[0].response[: len(trunk.response)] == trunk.response
        if trunk_tokens:
            ended = trunk.response[-1] in STOPS
            assert len(rows) == (2 if ended else 3)
        for number, row in enumerate(rows):
            leaf = (worth(row.text) - root) + (worth(row.text) - value)
            weights = torch.full((len(row.response),), leaf, dtype=torch.float64)
            weights[:fork] = (value - root) + (value - root)
            weighted.append((row, weights, slice(0 if number == 0 else fork, None)))
    policies["actor"].update(weighted)
    return {
        "actor/loss": -float(torch.cat([weights[tokens] for _, weights, tokens in weighted]).mean())
    }  # ratios are 1


def raft_step(policies: dict[str, Policy], record: list[list[Row]]) -> dict[str, float]:
    """The first of the best responses to each prompt, where one is better than another."""
    (rows,) = record
    groups: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.parent].append(row)

    def of(row: Row) -> bool:
        return worth(row.text) > 0.5

    best = [max(group, key=of) for group in groups.values() if len({of(row) for row in group}) > 1]
    ones = [(row, torch.ones(len(row.response), dtype=torch.float64), slice(None)) for row in best]
    return {"actor/loss": policies["actor"].update(ones)}


def play_step(policies: dict[str, Policy], record: list[list[Row]]) -> dict[str, float]:
    """R-Zero, section 3: worth of a question by the share of its answers that are right; GRPO's advantages for both."""
    questions, answers = record
    to: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in answers:
        to[row.parent].append(row)
    beside: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in questions:
        beside[row.parent].append(row)
        for answer in to[row.path]:
            assert answer.prompt == [ord(character) for character in row.text or "?"]
    value = {row.path: 1 - abs(2 * mean([worth(answer.text) for answer in to[row.path]]) - 1) for row in questions}
    asked = [(row, standardized(value[row.path], [value[r.path] for r in beside[row.parent]])) for row in questions]
    said = [(row, standardized(worth(row.text), [worth(r.text) for r in to[row.parent]])) for row in answers]
    return {
        "proposer/loss": policies["proposer"].update(spread(asked)),
        "solver/loss": policies["solver"].update(spread(said)),
    }


def standardized(x: float, group: Sequence[float]) -> float:
    """GRPO's: less the mean, over the deviation with N - 1, and 1e-6."""
    deviation = (sum((each - mean(group)) ** 2 for each in group) / (len(group) - 1)) ** 0.5
    return (x - mean(group)) / (deviation + 1e-6)


def spread(rows: Sequence[tuple[Row, float]]) -> list[tuple[Row, Tensor, slice]]:
    return [(row, torch.full((len(row.response),), a, dtype=torch.float64), slice(None)) for row, a in rows]


class Case(NamedTuple):
    """An algorithm, the roles that it trains, and how many calls of `generate` a step has."""

    module: Callable[[dict[str, CausalLM]], RLModule]
    roles: tuple[str, ...]
    calls: int
    step: Callable[[dict[str, Policy], list[list[Row]]], dict[str, float]]


CASES = {
    "TreeRL": Case(
        lambda of: RecordedTree(
            **of,
            reward=OddShare(),
            group_size=6,
            branches=3,
            max_response_length=LONGEST,
            stop_token_ids=STOPS,
            importance=None,  # of what the engine says, in float32
        ),
        ("actor",),
        3,
        tree_step,
    ),
    "TreeRL after 3 tokens": Case(
        lambda of: RecordedTree(
            **of,
            reward=OddShare(),
            group_size=6,
            branches=3,
            trunk_tokens=3,
            max_response_length=LONGEST,
            stop_token_ids=STOPS,
            importance=None,
        ),
        ("actor",),
        3,
        partial(tree_step, trunk_tokens=3),
    ),
    "RAFT": Case(
        lambda of: RecordedRAFT(**of, reward=OddMajority(), group_size=3, max_response_length=LONGEST),
        ("actor",),
        1,
        raft_step,
    ),
    "SelfPlay": Case(
        lambda of: RecordedPlay(
            **of, reward=OddShare(), ask="{question}?", questions=2, answers=3, max_response_length=LONGEST
        ),
        ("proposer", "solver"),
        2,
        play_step,
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("models")
    return {
        role: write_tiny_model(made / role, seed=seed, layers=2, max_position=128)
        for seed, role in enumerate(("actor", "proposer", "solver"), start=7)
    }


def run(case: Case, folders: dict[str, Path], out: Path, strategy: Any) -> Fit:
    module: Any = case.module({role: CausalLM(str(folders[role]), optimizer=SGD) for role in case.roles})
    module.record = []
    return Fit(module, sums(12, PROMPTS), out, strategy, settings={"max_steps": STEPS})


@pytest.fixture(scope="module", params=CASES)
def alone(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Result]:
    out = tmp_path_factory.mktemp(request.param) / "run"
    with wide_casts():
        found = fit(run(CASES[request.param], folders, out, partial(SingleProcess, "fp64", token_budget=60)))
    return request.param, found


def test_losses_and_weights_are_those_of_the_papers(alone: tuple[str, Result], folders: dict[str, Path]) -> None:
    name, found = alone
    case, policies = CASES[name], {role: Policy(folders[role]) for role in CASES[name].roles}
    for number, metrics in enumerate(found.steps):
        with wide_casts():
            expected = case.step(policies, found.record[number * case.calls : (number + 1) * case.calls])
        for metric, loss in expected.items():
            assert metrics[metric] == pytest.approx(loss, rel=1e-8), f"{metric} of step {number}"
    for key, weight in found.weights.items():
        expected_weight = dict(policies["actor"].model.named_parameters())[key]
        assert torch.allclose(weight, expected_weight, rtol=0, atol=1e-9), key


def test_two_ranks_come_to_the_samples_and_losses_of_one(
    alone: tuple[str, Result], folders: dict[str, Path], tmp_path: Path, ranks2: RankPool
) -> None:
    name, expected = alone
    case = CASES[name]
    results = ranks2.run(fit, run(case, folders, tmp_path / "run", FSDP))
    sampled = [{(row.path, tuple(row.response)) for row in call} for call in expected.record]
    assert [
        {(row.path, tuple(row.response)) for call in calls for row in call}
        for calls in zip(*(result.record for result in results), strict=True)
    ] == sampled
    for role in case.roles:
        for step, (here, there) in enumerate(zip(results[0].steps, expected.steps, strict=True)):
            assert here[f"{role}/loss"] == pytest.approx(there[f"{role}/loss"], rel=1e-3, abs=1e-5), step
