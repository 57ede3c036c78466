"""A frozen policy of the run grades responses, in a run on one rank and on two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlflow import CausalLM, PerSample, RewardModel, Rollout, UserError, node
from rlflow.algorithms import DAPO, DPO, GRPO, ReMax
from rlflow.algorithms.judged import Judged
from rlflow.memory.estimate import memories
from rlflow.models.tiny import write_tiny_model
from rlflow.rewards import Rubric
from rlflow.rollout import TransformersEngine
from rlflow.rollout.assignment import EngineSettings
from rlflow.run.prepare import prepare
from rlflow.run.tables import run_workload
from rlflow.settings import Settings
from rlflow.strategies import SingleProcess
from rlflow.types import Each, WithTexts
from tests.controller.policies import paths_of
from tests.controller.runs import FSDP, SGD, Fit, Result, fit, sums, terse
from tests.ranks import RankPool

ASKED = "{question} {response}"


class OddShare(Rubric):
    """Takes the share of odd characters for the grade, where their number is odd too."""

    def shares(self, said: str) -> dict[str, float]:
        odd = [ord(character) % 2 for character in said]
        return {"score": sum(odd) / len(odd)} if sum(odd) % 2 else {}


@dataclass(eq=False)
class JudgedGRPO(Judged, GRPO):
    """Records what was said and what it was worth."""

    record: list[dict[tuple[int, ...], Any]] = field(default_factory=list)

    @node(generates="judge")
    def verdict(self, rollout: Rollout) -> Rollout:
        verdict = super().verdict(rollout)
        prompts = [row.tolist() for row in rollout.as_prompts(self.asked).prompt_ids.rows()]
        rows: Sequence[list[int]] = verdict.response_ids.tolist()
        said = [row[:length] for row, length in zip(rows, verdict.lengths.tolist(), strict=True)]
        texts = zip(paths_of(rollout), rollout.texts, prompts, said, verdict.texts, strict=True)
        self.record.append({path: list(rest) for path, *rest in texts})
        return verdict

    @node
    def model_scores(self, rollout: WithTexts, grades: Each[PerSample]) -> PerSample:  # type: ignore[override]
        scores = super().model_scores(rollout, grades)
        for path, score in zip(paths_of(rollout), scores.tolist(), strict=True):  # type: ignore[arg-type]
            self.record[-1][path].append(score)
        return scores


class JudgedDAPO(JudgedGRPO, DAPO):
    """Drops groups that the judge grades alike."""


def judged(policy: Path, other: Path, rubric: Rubric | None = None, **settings: Any) -> JudgedGRPO:
    given = {"group_size": 3, "max_response_length": 6, "judge_length": 5, **settings}
    actor, judge = CausalLM(str(policy), optimizer=SGD), CausalLM(str(other))
    return JudgedGRPO(actor, judge=judge, rubric=rubric or OddShare(prompt=ASKED), judge_coef=2.0, **given)


def run(module: Judged, folder: Path, strategy: Any = None) -> Fit:
    more = {} if strategy is None else {"strategy": strategy}
    return Fit(module, sums(12, 4), folder, settings={"max_steps": 2}, **more)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge") / "judge"
    return write_tiny_model(folder, seed=5, hidden_size=64, intermediate_size=96, layers=2, max_position=256)


@pytest.fixture(scope="module")
def alone(policy: Path, other: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fit(run(judged(policy, other), tmp_path_factory.mktemp("alone") / "run"))


def test_the_judge_says_its_likeliest_tokens_of_each_response(alone: Result, other: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(other)
    for response, prompt, said, _, _ in alone.record[0].values():
        assert response
        with torch.no_grad():
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=len(said), do_sample=False)
        assert ids[0, len(prompt) :].tolist() == said


def test_each_policy_has_a_number_of_verified_tensors(alone: Result) -> None:
    found = [{name for name in step if name.startswith("sync/verified_tensors")} for step in alone.steps]
    actor, judge = "sync/verified_tensors/actor", "sync/verified_tensors/judge"
    assert found == [{actor, judge}, *[{actor}] * (len(alone.steps) - 1)]  # the judge is frozen


def test_a_grade_is_the_reward_and_one_that_cannot_be_read_is_none(alone: Result) -> None:
    rubric, graded = OddShare(prompt=ASKED), 0
    for step, rows in zip(alone.steps, alone.record, strict=True):
        for _, _, _, verdict, score in rows.values():
            assert score == pytest.approx(2 * rubric.shares(verdict).get("score", 0.0))
        readable = [bool(rubric.shares(row[3])) for row in rows.values()]
        graded += sum(readable)
        assert step["verdict/readable"] == pytest.approx(sum(readable) / len(readable))
        mean = sum(row[4] for row in rows.values()) / len(rows)
        assert step["reward/model"] == step["reward/outcome"] == pytest.approx(mean)
    assert 0 < graded < sum(len(rows) for rows in alone.record)


def test_a_verdict_ends_at_the_judges_own_end_tokens(policy: Path, other: Path, tmp_path: Path) -> None:
    result = fit(run(judged(policy, terse(other, tmp_path / "judge")), tmp_path / "run"))
    assert all(len(said) == 1 for _, _, said, _, _ in result.record[0].values())
    assert result.steps[0]["rollout/length"] > 1


def test_behind_a_filter_the_judges_engine_is_counted_in_addition_to_the_actors(
    policy: Path, other: Path, tmp_path: Path
) -> None:
    module, engine = judged(policy, other), EngineSettings(TransformersEngine())
    for kind, together in ((JudgedGRPO, ()), (JudgedDAPO, (("actor", "judge"),))):
        module.__class__ = kind
        made = prepare(module, sums(12, 4), Settings(max_steps=1), SingleProcess(), engine, tmp_path)
        (memory,) = memories(run_workload(made), capacity=1e9)
        assert memory.together == together


def test_two_ranks_receive_the_same_verdicts(
    alone: Result, policy: Path, other: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    on_two = ranks2.run(fit, run(judged(policy, other), tmp_path / "run", FSDP))
    for step in range(2):
        assert on_two[0].record[step] | on_two[1].record[step] == alone.record[step]
        for name in ("actor/loss", "actor/grad_norm", "reward/outcome"):
            assert on_two[0].steps[step][name] == pytest.approx(alone.steps[step][name], rel=1e-4, abs=1e-6)


def test_a_question_that_is_too_long_is_refused_in_one_line(policy: Path, other: Path, tmp_path: Path) -> None:
    long = Rubric(prompt="Grade this. " * 200 + "{response}")
    with pytest.raises(
        UserError, match=r"^the judge's question about a response is \d+ tokens long, and `data.max_pro"
    ):
        fit(run(judged(policy, other, long), tmp_path / "run"))


class WordyOfSome(Rubric):
    """Asks of responses that begin with an odd character in many words; each verdict is worth 1."""

    def question(self, text: str, row: Mapping[str, Any]) -> str:
        return super().question(text, row) + " x" * 1000 * odd(text)

    def shares(self, said: str) -> dict[str, float]:
        return {"score": 1.0}


def odd(text: str) -> int:
    return ord(text[:1] or "a") % 2


@dataclass(eq=False)
class LeavesOut(Judged, GRPO):
    """Records each step's responses and their scores."""

    record: list[list[tuple[str, float]]] = field(default_factory=list)

    @node
    def model_scores(self, rollout: WithTexts, grades: Each[PerSample]) -> PerSample:
        scores = super().model_scores(rollout, grades)
        self.record.append(list(zip(rollout.texts, scores.tolist(), strict=True)))
        return scores


def test_a_response_whose_question_is_too_long_is_worth_0_and_counted(
    policy: Path, other: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    module = LeavesOut(
        CausalLM(str(policy), optimizer=SGD),
        judge=CausalLM(str(other)),
        rubric=WordyOfSome(prompt=ASKED),
        max_response_length=6,
        judge_length=5,
        group_size=3,
        on_too_long="zero",
    )
    results = ranks2.run(fit, run(module, tmp_path / "run", FSDP))
    for step in range(2):
        rows = [row for result in results for row in result.record[step]]
        assert all(score == (0.0 if odd(text) else 1.0) for text, score in rows)
        left_out = sum(odd(text) for text, _ in rows)
        assert 0 < left_out < len(rows) == 12
        assert results[0].steps[step]["verdict/too_long"] == pytest.approx(left_out / 12)


def test_on_too_long_is_raise_or_zero(policy: Path, other: Path) -> None:
    with pytest.raises(UserError, match=r"^`on_too_long` is 'mask'; give one of raise, zero$"):
        judged(policy, other, on_too_long="mask")


def test_a_judge_and_a_reward_model_are_not_both_asked(policy: Path, other: Path) -> None:
    with pytest.raises(UserError, match=r"^`reward_model` and `judge` are set"):
        judged(policy, other, reward_model=RewardModel(str(other)))


@dataclass(eq=False)
class JudgedReMax(Judged, ReMax):
    """ReMax with a judge: its greedy responses would have no grade."""


@dataclass(eq=False)
class JudgedDPO(Judged, DPO):
    """It has no rewards."""


def test_an_algorithm_that_the_judge_cannot_reward_is_refused(policy: Path, other: Path) -> None:
    actor, judge = CausalLM(str(policy), optimizer=SGD), CausalLM(str(other))
    with pytest.raises(UserError, match=r"^JudgedReMax has greedy responses, which `judge` would not grade; take"):
        JudgedReMax(actor, judge=judge)
    with pytest.raises(UserError, match=r"^no node of JudgedDPO reads `model_scores`, which `judge` gives; take"):
        JudgedDPO(actor, judge=judge)


def test_a_verdict_that_is_longer_than_engines_write_is_refused(policy: Path, other: Path) -> None:
    with pytest.raises(UserError, match=r"^`judge_length` is 7, and `max_response_length` 6, the most that engines"):
        judged(policy, other, judge_length=7)
