"""The parts of a reward, as nodes read them on any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rlflow import CausalLM, PerSample, PerToken, Rollout, node
from rlflow.errors import UserError
from rlflow.rewards import SampleReward
from rlflow.types import WithTexts
from tests.controller.runs import SGD, ZERO2, Fit, OddCharacters, RaggedGRPO, failing_fit, fit, sums
from tests.ranks import RankPool


class TwoParts(SampleReward):
    """The number of characters of odd code, and whether the first one is."""

    def score_sample(self, text: str, row: dict[str, Any]) -> Mapping[str, float]:
        odd = [ord(character) % 2 for character in text]
        return {"odd": float(sum(odd)), "begins": float(odd[0] if odd else 0)}


class Broken(TwoParts):
    """Fails on the prompt `0+0=`."""

    def score_sample(self, text: str, row: dict[str, Any]) -> Mapping[str, float]:
        if row["question"] == "0+0=":
            raise ValueError("no answer here")
        return super().score_sample(text, row)


@dataclass(frozen=True)
class Odd:
    """One of the parts."""

    odd: PerSample


class PartsGRPO(RaggedGRPO):
    """Records parts over all ranks; the loss reads them where the actor's rows lie."""

    rewards = None
    record: list[list[float]]

    @node
    def parts(self, rollout: WithTexts) -> dict[str, PerSample]:
        return self.reward_parts(rollout)

    @node
    def odd(self, parts: dict[str, PerSample]) -> Odd:
        return Odd(parts["odd"])

    @node
    def advantages(self, rollout: Rollout, parts: dict[str, PerSample], odd: Odd) -> PerSample:
        total = parts["odd"] + 10 * parts["begins"]
        self.record = [self.all_rows(total).tolist(), self.all_rows(odd.odd).tolist()]
        return total - self.mean(total).to(total.dtype)

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Rollout, advantages: PerSample, parts: dict[str, PerSample]) -> PerToken:
        assert sorted(parts) == ["begins", "odd"]
        self.log("actor/begins", parts["begins"])
        return super().actor_loss(rollout, advantages)


class Lacking(PartsGRPO):
    """Reads a part that the reward has not."""

    def odd(self, parts: dict[str, PerSample]) -> Odd:
        return Odd(parts["ood"])


def run_of(policy: Path, folder: Path, kind: type[RaggedGRPO] = PartsGRPO, prompts: int = 3, **given: Any) -> Fit:
    reward = given.pop("reward", TwoParts())
    module = kind(CausalLM(str(policy), optimizer=SGD), reward, group_size=2, max_response_length=8)
    return Fit(module, sums(6, prompts), folder, settings={"max_steps": 2}, **given)


def test_nodes_read_the_parts_of_a_reward_alike_on_one_rank_and_on_two(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    alone = fit(run_of(policy, tmp_path / "1"))
    total, odd = alone.record
    assert len(set(odd)) > 1
    assert any(a != b for a, b in zip(total, odd, strict=True))
    for result in ranks2.run(fit, run_of(policy, tmp_path / "2", strategy=ZERO2)):
        assert result.record == alone.record
        for name in ("reward/odd", "reward/begins", "reward/mean", "actor/begins"):
            assert result.steps[1][name] == pytest.approx(alone.steps[1][name], rel=1e-6), name
    assert alone.steps[1]["reward/mean"] == pytest.approx(
        alone.steps[1]["reward/odd"] + alone.steps[1]["reward/begins"], rel=1e-6
    )


def test_a_rank_without_samples_has_the_parts_of_the_others(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    one_prompt = run_of(policy, tmp_path / "run", prompts=1, strategy=ZERO2)
    first, second = ranks2.run(fit, one_prompt)
    assert len(first.record[0]) == 2
    assert first.record == second.record


def test_a_part_that_the_reward_lacks_is_named_on_every_rank(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    run = run_of(policy, tmp_path / "run", Lacking, prompts=1, strategy=ZERO2)
    for rank, result in enumerate(ranks2.run(failing_fit, run)):
        line, place = result.error.split(" (rank ")
        assert line == (
            'a node reads part `ood`, which the reward lacks; its parts are [begins, odd]. Did you mean "odd"? Give'
            " the reward that part, or read another"
        )
        assert place.startswith(f"{rank}, node `odd`, ")


def test_a_reward_of_one_number_has_no_parts_to_read(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="PartsGRPO reads the reward's parts, and OddCharacters gives one number alone"):
        fit(run_of(policy, tmp_path / "run", reward=OddCharacters()))


def test_a_reward_that_fails_on_one_rank_ends_all_ranks_with_its_line(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    run = run_of(policy, tmp_path / "run", prompts=2, reward=Broken(), strategy=ZERO2)
    run = replace(run, data=sums(2, 2))  # one prompt for each rank
    errors = [result.error for result in ranks2.run(failing_fit, run)]
    assert errors[0].rpartition(" (rank ")[0] == errors[1].rpartition(" (rank ")[0]
    assert "Broken failed on sample 0 with ValueError: no answer here (response" in errors[0]


class NotANumber(PartsGRPO):
    """Makes a NaN of the second sample of the prompt `0+0=`, which lies on one rank alone."""

    broken = float("nan")

    def parts(self, rollout: WithTexts) -> dict[str, PerSample]:
        parts = self.reward_parts(rollout)
        for row, asked in enumerate(rollout.rows):
            if asked["question"] == "0+0=" and row % 2:
                parts["begins"][row] = self.broken
        return parts


def test_a_part_that_is_nan_on_one_rank_ends_all_with_its_row(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    run = replace(run_of(policy, tmp_path / "run", NotANumber, prompts=2, strategy=ZERO2), data=sums(2, 2))
    errors = [result.error for result in ranks2.run(failing_fit, run)]
    assert errors[0] == errors[1]
    of = r"part `begins` of `parts` is infinite or NaN for sample 1 of prompt [01] of the run \(.*test_reward_parts"
    assert re.match(of, errors[0])


class Infinite(NotANumber):
    """Divides by 0."""

    broken = float("inf")


def test_a_part_that_is_infinite_ends_a_run_on_one_rank_with_its_row(policy: Path, tmp_path: Path) -> None:
    error = failing_fit(run_of(policy, tmp_path / "run", Infinite, prompts=2)).error
    assert re.match(r"part `begins` of `parts` is infinite or NaN for sample \d+ of prompt \d+ of the run", error)


class OneNumber(PartsGRPO):
    """Returns a number of all samples where one of each is annotated."""

    def advantages(self, rollout: Rollout, parts: dict[str, PerSample], odd: Odd) -> PerSample:
        return parts["odd"].sum()


class NotOdd(PartsGRPO):
    """Returns another type than it is annotated with."""

    def odd(self, parts: dict[str, PerSample]) -> Odd:
        return parts["odd"]


WRONG = {OneNumber: "`advantages` has shape [] and is annotated", NotOdd: "`odd` is a Tensor and is annotated as Odd"}


@pytest.mark.parametrize("kind", WRONG)
def test_a_value_that_is_not_of_its_type_is_one_line_on_two_ranks_too(
    kind: type[PartsGRPO], policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    for result in ranks2.run(failing_fit, run_of(policy, tmp_path / "run", kind, prompts=2, strategy=ZERO2)):
        assert result.error.startswith(WRONG[kind])
