"""Samples that a reward fails on and drops: out of the loss and of statistics, wherever the rows are brought."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow import PerSample, PerToken, Rollout, UserError, node
from rlflow.algorithms import RAFT, REINFORCEPlusPlusBaseline
from rlflow.algorithms.reinforce_plus_plus_baseline import MaskedGroups
from rlflow.rewards import WeightedSum
from rlflow.rewards.reward import OnError
from rlflow.strategies import SingleProcess
from rlflow.types import Each, Grouped, NewRows, Sampled, WithTexts
from rlflow.values.path import NO_GROUP
from tests.algorithm_factory import made
from tests.checkpoint.test_checkpoint import StopAfter
from tests.controller.runs import FSDP, SGD, ZERO2, Fit, OddCharacters, RaggedGRPO, Result, failing_fit, fit, sums
from tests.controller.test_filled_steps import Picky
from tests.controller.test_ranks import FLOAT32, difference
from tests.ranks import RankPool
from tests.slow import slow_but

STEPS, GROUP, NEEDED = 3, 4, 4
APART = {"rollout": [0], "actor": [1]}


def fails(text: str) -> bool:
    """About one response in five."""
    return sum(map(ord, text)) % 5 == 0


class Failing(OddCharacters):
    """Gives NaN for some responses."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return float("nan") if fails(text) else super().score_sample(text, row)


class Noting(RaggedGRPO):
    """Records, on the ranks that score, how many of each step's samples failed."""

    record: list[int]

    def rewards(self, rollout: WithTexts) -> PerSample:
        self.record.append(sum(map(fails, rollout.texts)))
        return super().rewards(rollout)

    def actor_loss(
        self,
        rollout: Sampled,
        advantages: PerSample,
        old_logprobs: PerToken | None = None,
        ref_logprobs: PerToken | None = None,
    ) -> PerToken:
        self.log("trained", torch.ones(len(advantages)), reduce_fx="sum")
        return super().actor_loss(rollout, advantages, old_logprobs, ref_logprobs)


class ByHand(Noting):
    """Takes the same samples out of the loss mask, and out of their groups, in nodes of its own."""

    @node
    def kept(self, rollout: WithTexts) -> PerSample:
        return torch.tensor([not fails(text) for text in rollout.texts], dtype=torch.bool)

    @node
    def masked(self, rollout: Rollout, kept: PerSample) -> Rollout:
        return dataclasses.replace(rollout, loss_mask=rollout.loss_mask & kept[:, None])

    @node
    def advantages(  # type: ignore[override]
        self, rollout: Grouped, rewards: PerSample, kept: PerSample
    ) -> PerSample:
        found = torch.zeros_like(rewards)
        for group in rollout.group.unique().tolist():
            rows = ((rollout.group == group) & kept).nonzero().flatten().tolist()
            numbers = [rewards[row].item() for row in rows]
            mean = sum(numbers) / max(1, len(numbers))
            std = (sum((number - mean) ** 2 for number in numbers) / max(1, len(numbers) - 1)) ** 0.5
            for row, number in zip(rows, numbers, strict=True):
                found[row] = (number - mean) / (std + 1e-6)
        return found

    def actor_loss(  # type: ignore[override]
        self, masked: Sampled, advantages: PerSample, old_logprobs: PerToken, ref_logprobs: PerToken | None = None
    ) -> PerToken:
        return super().actor_loss(masked, advantages, old_logprobs, ref_logprobs)


def module(policy: Path, on_error: OnError, kind: type[Any] = Noting, **given: Any) -> Any:
    settings = {"optimizer": SGD, "group_size": GROUP, "max_response_length": 12, "samples_per_update": 8, **given}
    found = made(kind, policy, Failing(on_error), **settings)
    found.record = []
    return found


def run(policy: Path, folder: Path, on_error: OnError, kind: type[Any] = Noting, **more: Any) -> Fit:
    strategy, given = more.pop("strategy", SingleProcess), more.pop("given", {})
    settings = {"max_steps": STEPS, **more}
    return Fit(module(policy, on_error, kind, **given), sums(12, NEEDED), folder, strategy, settings=settings)


def same(one: Result, other: Result) -> bool:
    assert one.weights.keys() == other.weights.keys()
    return all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


@pytest.mark.parametrize("aggregation", slow_but(["token-mean"], ["token-mean", "sequence-mean-token-sum"]))
def test_dropped_samples_count_as_those_whose_tokens_a_node_takes_out_of_the_loss(
    aggregation: str, policy: Path, tmp_path: Path
) -> None:
    given = {"loss_aggregation": aggregation}
    dropped = fit(run(policy, tmp_path / "dropped", "drop", given=given))
    by_hand = fit(run(policy, tmp_path / "by hand", "zero", ByHand, given=given))
    zero = fit(run(policy, tmp_path / "zero", "zero", given=given))
    assert dropped.record == by_hand.record
    assert all(failed > 0 for failed in dropped.record)
    assert [step["reward/errors"] for step in dropped.steps] == dropped.record
    assert [step["trained"] for step in dropped.steps] == [NEEDED * GROUP - failed for failed in dropped.record]
    assert same(dropped, by_hand)
    assert not same(dropped, zero)
    for found, expected in zip(dropped.steps, by_hand.steps, strict=True):
        assert found["actor/loss"] == expected["actor/loss"]
        scored = 1 - expected["reward/errors"] / (NEEDED * GROUP)  # a share of the step's samples
        for metric in ("reward/mean", "reward/outcome"):
            assert found[metric] == pytest.approx(expected[metric] / scored)


def test_a_dropped_sample_is_not_counted_by_the_aggregation_constant(policy: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "given": {"loss_aggregation": "constant", "samples_per_update": NEEDED * GROUP},
        "max_steps": 1,
    }
    dropped = fit(run(policy, tmp_path / "dropped", "drop", **more)).steps[0]
    by_hand = fit(run(policy, tmp_path / "by hand", "zero", ByHand, **more)).steps[0]
    share = 1 - dropped["reward/errors"] / (NEEDED * GROUP)  # the others are divided by all 16 rows
    for metric in ("actor/loss", "actor/grad_norm"):
        assert 0 != by_hand[metric] == pytest.approx(share * dropped[metric], rel=1e-6)


class FailingOnAll(OddCharacters):
    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        raise KeyError("solution")


def test_a_run_whose_samples_are_all_dropped_fails(policy: Path, tmp_path: Path) -> None:
    of = made(Noting, policy, FailingOnAll("drop"), group_size=GROUP, max_response_length=12)
    of.record = []
    told = "the reward of `actor` failed on all samples in 3 updates in a row, which were skipped"
    with pytest.raises(UserError, match=told):
        fit(Fit(of, sums(12, NEEDED), tmp_path, settings={"max_steps": 5}))


def test_a_step_whose_other_samples_are_truncated_has_not_failed(policy: Path, tmp_path: Path) -> None:
    found = fit(
        run(policy, tmp_path, "drop", given={"mask_truncated": True, "max_response_length": 2, "stop_token_ids": (40,)})
    )
    assert all(0 < failed < NEEDED * GROUP for failed in found.record)
    assert not any("actor/skipped_updates" in step or "actor/loss" in step for step in found.steps)


@dataclass(eq=False)
class RaggedBaseline(REINFORCEPlusPlusBaseline):
    """A baseline of responses that end early."""

    stop_token_ids: tuple[int, ...] = tuple(range(40, 60))


class WhitenedByHand(RaggedBaseline):
    """Gives the mean and the deviation of a step without the samples that failed."""

    @node
    def advantages(self, rollout: MaskedGroups, rewards: PerSample, fine: PerSample) -> PerToken:  # type: ignore[override]
        centred = torch.zeros_like(rewards)
        for group in rollout.group.unique():
            counted = (rollout.group == group) & (fine > 0)
            centred[counted] = rewards[counted] - rewards[counted].double().mean().float()
        mask = rollout.loss_mask & (fine > 0)[:, None]
        x = centred[:, None].expand(mask.shape)
        return torch.where(mask, (x - x[mask].double().mean()) / x[mask].double().std(), 0.0).float()

    @node
    def fine(self, rollout: WithTexts) -> PerSample:
        return torch.tensor([not fails(text) for text in rollout.texts], dtype=torch.float32)


def test_a_step_s_mean_and_deviation_are_without_the_samples_that_failed(policy: Path, tmp_path: Path) -> None:
    dropped = fit(run(policy, tmp_path / "dropped", "drop", RaggedBaseline))
    by_hand = fit(run(policy, tmp_path / "by hand", "drop", WhitenedByHand))
    zero = fit(run(policy, tmp_path / "zero", "zero", RaggedBaseline))
    assert difference(dropped.weights, by_hand.weights) < FLOAT32
    assert difference(dropped.weights, zero.weights) > 10 * FLOAT32


class Shaped(Noting):
    """Scores in a node before that of the rewards."""

    @node
    def scores(self, rollout: WithTexts) -> PerSample:
        return super().rewards(rollout)

    def rewards(self, rollout: Sampled, scores: PerSample) -> PerSample:  # type: ignore[override]
        return scores


def test_rewards_that_another_node_scored_are_compared_alike(policy: Path, tmp_path: Path) -> None:
    plain, shaped = (fit(run(policy, tmp_path / kind.__name__, "drop", kind)) for kind in (Noting, Shaped))
    assert plain.record == shaped.record
    assert same(plain, shaped)


WAYS: dict[str, dict[str, Any]] = {
    "zero2": {"strategy": ZERO2},
    "fsdp": {"strategy": FSDP},
    "apart": {"strategy": ZERO2, "placement": APART},
    "overlapping": {"strategy": ZERO2, "placement": APART, "max_staleness": 1},
    "partial": {"strategy": ZERO2, "partial_rollout": 5},
}


@pytest.mark.parametrize("way", slow_but(("overlapping", "partial"), WAYS))
def test_marks_follow_their_rows_to_where_these_are_trained(
    way: str, policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    dropped = ranks2.run(fit, run(policy, tmp_path / "dropped", "drop", **WAYS[way]), timeout_s=200)
    by_hand = ranks2.run(fit, run(policy, tmp_path / "by hand", "zero", ByHand, **WAYS[way]), timeout_s=200)
    assert sum(sum(result.record) for result in dropped) > 0
    for found, expected in zip(dropped, by_hand, strict=True):
        assert found.record == expected.record
        assert difference(found.weights, expected.weights) < FLOAT32 if found.weights else not expected.weights


class PickyFailing(Picky):
    """Leaves out easy prompts; records which of the kept rows a node that follows from the scores sees as dropped."""

    @node
    def marks(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        self._note("marks", self.all_rows((rollout.group == NO_GROUP).to(torch.uint8)))
        return rewards

    @node
    def failed(self, rollout: WithTexts) -> PerSample:
        self._note("failed", self.all_rows(torch.tensor([fails(text) for text in rollout.texts], dtype=torch.uint8)))
        return rollout.lengths


def picky(policy: Path, folder: Path, **more: Any) -> Fit:
    found = run(policy, folder, "drop", PickyFailing, **more)
    found.module.record = {}
    return found


def test_a_surplus_takes_its_marks_to_the_next_step_and_through_a_checkpoint(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    whole = ranks2.run(fit, picky(policy, tmp_path / "whole", strategy=ZERO2), timeout_s=200)
    parts = {"strategy": ZERO2, "save_every_n_steps": 1}
    ranks2.run(fit, picky(policy, tmp_path / "parts", callbacks=[StopAfter(1)], **parts), timeout_s=200)
    rest = ranks2.run(fit, picky(policy, tmp_path / "parts", ckpt_path="last", **parts), timeout_s=200)
    assert any(step["filter/surplus"] > 0 for step in whole[0].steps)
    for through, continued in zip(whole, rest, strict=True):
        assert through.record["marks"] == through.record["failed"]  # one each of what is kept
        assert continued.record["marks"] == through.record["marks"][1:]
        assert any(any(step) for step in through.record["marks"])
        assert same(through, continued)


@pytest.mark.parametrize(("before", "after"), slow_but([("zero", "drop")], [("zero", "drop"), ("drop", "zero")]))
def test_another_failure_policy_resumes_with_what_is_in_progress(
    before: OnError, after: OnError, policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    way = {**WAYS["overlapping"], "save_every_n_steps": 1}
    ranks2.run(fit, run(policy, tmp_path / "before", before, **way, callbacks=[StopAfter(1)]), timeout_s=200)
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    same = ranks2.run(fit, run(policy, tmp_path / "before", before, **way, ckpt_path="last"), timeout_s=200)
    rest = ranks2.run(fit, run(policy, tmp_path / "after", after, **way, ckpt_path="last"), timeout_s=200)
    assert [len(result.steps) for result in rest] == [STEPS - 1] * 2
    second, third = ([result[0].steps[i]["actor/loss"] for result in (same, rest)] for i in range(2))
    assert (second[0] == second[1]) == (before == "zero"), "what was scored before has no marks"
    assert third[0] != third[1]


def test_a_checkpoint_keeps_which_samples_in_progress_have_failed(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    way = {**WAYS["overlapping"], "save_every_n_steps": 1}
    whole = ranks2.run(fit, run(policy, tmp_path / "whole", "drop", **way), timeout_s=200)
    ranks2.run(fit, run(policy, tmp_path / "parts", "drop", **way, callbacks=[StopAfter(1)]), timeout_s=200)
    rest = ranks2.run(fit, run(policy, tmp_path / "parts", "drop", **way, ckpt_path="last"), timeout_s=200)
    assert all(same(*both) for both in zip(whole, rest, strict=True))


@dataclass(eq=False)
class RaggedRAFT(RAFT):
    """RAFT whose random model ends a response after about six tokens."""

    stop_token_ids: tuple[int, ...] = tuple(range(40, 60))


class OfTheRest(RaggedRAFT):
    """Chooses, by itself, among the responses that can be scored."""

    @node
    def fine(self, rollout: WithTexts) -> PerSample:
        return torch.tensor([not fails(text) for text in rollout.texts], dtype=torch.float32)

    def best(  # type: ignore[override]
        self, batch: Grouped, rollout: Each[Rollout], rewards: Each[PerSample], fine: Each[PerSample]
    ) -> NewRows[Rollout]:
        chosen = []
        for group in rewards.parent.unique().tolist():
            rows = ((rewards.parent == group) & (fine.values > 0)).nonzero().flatten().tolist()
            numbers = [rewards.values[row].item() for row in rows]
            if numbers and max(numbers) > min(numbers):
                chosen.append(rows[numbers.index(max(numbers))])
        return rollout.values.take(torch.tensor(chosen, dtype=torch.int64))


def test_rows_that_are_made_of_a_group_are_made_without_the_dropped(policy: Path, tmp_path: Path) -> None:
    given = {"group_size": 3, "max_response_length": 12, "optimizer": SGD}

    def trained(kind: type[RaggedRAFT], on_error: OnError) -> Result:
        reward = WeightedSum({"odd": Failing(on_error)}, {"odd": 1.0})
        of = made(kind, policy, reward, **given)
        return fit(Fit(of, sums(12, NEEDED), tmp_path / f"{kind.__name__} {on_error}", settings={"max_steps": 2}))

    dropped, by_hand = trained(RaggedRAFT, "drop"), trained(OfTheRest, "zero")
    assert difference(dropped.weights, by_hand.weights) < FLOAT32
    assert difference(dropped.weights, trained(RaggedRAFT, "zero").weights) > 10 * FLOAT32


def test_a_node_may_not_score_the_responses_that_it_generates(policy: Path, tmp_path: Path) -> None:
    class Scoring(Noting):
        @node(generates="actor")
        def rollout(self, batch: Any) -> Rollout:
            made = super().rollout(batch)
            self.reward_function(made)
            return made

    with pytest.raises(UserError, match=r"node `rollout` scores responses .* would not notice"):
        fit(run(policy, tmp_path, "drop", Scoring))


def test_validation_counts_what_the_reward_failed_on(policy: Path, tmp_path: Path) -> None:
    of = run(policy, tmp_path, "zero", max_steps=1, val_check_interval=1, val_samples=2)
    fit(dataclasses.replace(of, data=sums(12, NEEDED, held_out=12)))
    validated = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert all(0 < line["val/errors"] < 24 and 0 <= line["val_greedy/errors"] <= 12 for line in validated)
    assert {sample["failed"] for sample in samples} <= {None, "zero"}
    assert [sample["failed"] == "zero" for sample in samples] == [fails(sample["response"]) for sample in samples]


class FailingInValidation(Failing):
    """Raises for a held-out row of the last rank."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        if row["question"] == "11+7=":
            raise KeyError("solution")
        return 1.0


def test_all_ranks_say_what_the_reward_of_one_failed_on_in_validation(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    of = made(Noting, policy, FailingInValidation("raise"), optimizer=SGD, group_size=GROUP, max_response_length=12)
    of.record = []
    settings = {"max_steps": 1, "val_check_interval": 1}
    held = Fit(of, sums(12, NEEDED, held_out=12), tmp_path, ZERO2, settings=settings)
    for result in ranks2.run(failing_fit, held, timeout_s=100):
        assert "FailingInValidation failed on sample 5 with KeyError: 'solution'" in result.error
