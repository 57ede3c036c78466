"""A step is filled with the groups that a filter keeps, the same at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from rlflow import Batch, CausalLM, PerSample, PerToken, Rollout, UserError, node
from rlflow.controller.prompt_sampler import kept_groups
from rlflow.rewards.reward import RewardInput, Scores
from rlflow.rollout.engine import Completion
from rlflow.rollout.transformers import TransformersEngine
from rlflow.strategies import SingleProcess
from rlflow.types import Grouped, WithDatasetRows, WithLossMask, WithTexts
from tests.algorithm_factory import made
from tests.checkpoint.test_checkpoint import StopAfter
from tests.controller.runs import SGD, ZERO2, Fit, OddCharacters, RaggedGRPO, Result, failing_fit, fit, sums
from tests.controller.test_ranks import FLOAT32, difference
from tests.ranks import RankPool
from tests.slow import slow_but

NEEDED, STEPS, GROUP = 4, 3, 3
EASY = ("0", "3", "6")  # digits that questions begin with


def is_hard(row: dict[str, Any]) -> bool:
    return not row["question"].startswith(EASY)


class MaskedRows(WithLossMask, WithDatasetRows, Protocol):
    pass


class Seen(Grouped, WithTexts, Protocol):
    version: PerSample


class Picky(RaggedGRPO):
    """Leaves out easy prompts. Records the rewards of all draws here, and what later nodes see over all ranks."""

    record: dict[str, list[list[float]]]

    def rewards(self, rollout: WithTexts) -> PerSample:
        rewards = super().rewards(rollout)
        self._note("drawn", rewards)
        return rewards

    @node(type="filter")
    def useful(self, rollout: MaskedRows, rewards: PerSample, old_logprobs: PerToken) -> PerSample:
        whole = (old_logprobs * rollout.loss_mask).sum(dim=1).isfinite() & rewards.isfinite()
        return whole & torch.tensor([is_hard(row) for row in rollout.rows], dtype=torch.bool)

    @node
    def seen(self, rollout: Seen, rewards: PerSample) -> PerSample:
        assert all(is_hard(row) for row in rollout.rows)
        assert len(rollout.texts) == len(rollout.group)
        for name, x in {"groups": rollout.group, "versions": rollout.version, "rewards": rewards}.items():
            self._note(name, self.all_rows(x))
        return rewards

    @node(role="rollout")
    def greedy(self, batch: Batch) -> Rollout:
        assert all(is_hard(row) for row in batch.rows)
        return self.generate(batch, temperature=0.0)

    @node
    def prompts(self, greedy: Rollout) -> PerSample:
        self._note("prompts", self.all_rows(greedy.group))
        self._note("prompt_versions", self.all_rows(greedy.version))
        return greedy.lengths

    def _note(self, name: str, x: torch.Tensor) -> None:
        self.record.setdefault(name, []).append(x.tolist())


def picky(policy: Path, kind: type[Picky] = Picky, **settings: Any) -> Picky:
    given = {"optimizer": SGD, "group_size": GROUP, "max_response_length": 12, "samples_per_update": 2 * GROUP}
    module = made(kind, policy, OddCharacters(), **given, **settings)
    module.record = {}
    return module


Runs = Callable[[int], list[Result]]


@pytest.fixture(scope="module")
def runs(policy: Path, tmp_path_factory: pytest.TempPathFactory, ranks2: RankPool, ranks4: RankPool) -> Runs:
    """Three steps of four groups each, of each rank, by the number of ranks; each run is made once."""
    folder = tmp_path_factory.mktemp("filling")

    def run(ranks: int, **given: Any) -> Fit:
        return Fit(picky(policy), sums(10, NEEDED), folder / str(ranks), settings={"max_steps": STEPS}, **given)

    @cache
    def results(ranks: int) -> list[Result]:
        if ranks == 1:
            return [fit(run(1))]
        return {2: ranks2, 4: ranks4}[ranks].run(fit, run(ranks, strategy=ZERO2), timeout_s=200)

    return results


def groups(result: Result) -> list[list[int]]:
    """The groups of each step's samples, each once."""
    return [list(dict.fromkeys(map(int, step))) for step in result.record["groups"]]


def test_kept_groups_fill_each_step_and_what_is_left_opens_the_next(runs: Runs) -> None:
    (alone,) = runs(1)
    kept = [group for step in groups(alone) for group in step]
    assert [len(step) for step in groups(alone)] == [NEEDED] * STEPS
    assert kept == sorted(set(kept))
    left = [int(step["filter/surplus"]) for step in alone.steps]
    assert left[0] > 0
    for step, (versions, before) in enumerate(zip(alone.record["versions"], [0, *left], strict=False)):
        assert versions == [step - 1] * (before * GROUP) + [step] * ((NEEDED - before) * GROUP)


def test_the_filter_s_metrics_count_draws_and_groups(runs: Runs) -> None:
    (alone,) = runs(1)
    before = 0.0
    for step in alone.steps:
        drawn = step["filter/draws"] * NEEDED
        assert step["filter/kept"] == pytest.approx((NEEDED + step["filter/surplus"] - before) / drawn)
        before = step["filter/surplus"]


def test_metrics_of_what_repeats_are_of_all_draws(runs: Runs) -> None:
    (alone,) = runs(1)
    draws = iter(alone.record["drawn"])
    for step in alone.steps:
        rewards = [reward for _ in range(int(step["filter/draws"])) for reward in next(draws)]
        assert len(rewards) == step["filter/draws"] * NEEDED * GROUP
        assert step["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))


@pytest.mark.parametrize("ranks", slow_but((2,), (2, 4)))
def test_every_number_of_ranks_keeps_the_same_groups_with_the_same_values(ranks: int, runs: Runs) -> None:
    for result in runs(ranks):
        for name in ("groups", "versions", "rewards", "prompts", "prompt_versions"):
            assert result.record[name] == runs(1)[0].record[name]


@pytest.mark.parametrize("ranks", slow_but((2,), (2, 4)))
def test_the_metrics_of_draws_are_the_same_for_every_number_of_ranks(ranks: int, runs: Runs) -> None:
    names = ("filter/kept", "filter/draws", "filter/surplus", "rollout/tokens", "rollout/length", "reward/mean")
    for result in runs(ranks):
        for found, expected in zip(result.steps, runs(1)[0].steps, strict=True):
            assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-12)
            assert found["sync/logprob_gap"] < 1e-5  # of the rows of this step's policy


@pytest.mark.parametrize("ranks", slow_but((2,), (2, 4)))
def test_the_weights_are_the_same_for_every_number_of_ranks(ranks: int, runs: Runs) -> None:
    for result in runs(ranks):
        assert difference(result.weights, runs(1)[0].weights) < FLOAT32


def test_a_node_after_the_filter_sees_prompts_of_kept_groups_with_the_policy_of_now(
    runs: Runs,
) -> None:
    (alone,) = runs(1)
    assert alone.record["prompts"] == groups(alone)
    assert alone.record["prompt_versions"] == [[step] * NEEDED for step in range(STEPS)]


@pytest.fixture(scope="module")
def stopped(policy: Path, tmp_path_factory: pytest.TempPathFactory, ranks2: RankPool) -> Fit:
    """The run of two ranks, stopped after a step with a surplus."""
    run = Fit(picky(policy), sums(10, NEEDED), tmp_path_factory.mktemp("stopped") / "run", ZERO2)
    settings = {"max_steps": STEPS, "save_every_n_steps": 1}
    ranks2.run(fit, replace(run, settings={**settings, "callbacks": [StopAfter(1)]}))
    checkpoint = run.folder / "checkpoint/step-00000001"
    return replace(run, settings={**settings, "callbacks": [StopAfter(STEPS)], "ckpt_path": str(checkpoint)})


def test_another_number_of_ranks_resumes_from_a_surplus(stopped: Fit, runs: Runs, tmp_path: Path) -> None:
    result = fit(replace(stopped, folder=tmp_path, strategy=SingleProcess))
    for name in ("groups", "versions", "rewards", "prompts"):
        assert result.record[name] == runs(1)[0].record[name][1:]
    assert difference(result.weights, runs(1)[0].weights) < FLOAT32


class KeepsFew(Picky):
    """Half of the groups are of use from the fifth draw on, and no node samples after the filter."""

    seen = None
    greedy = None
    prompts = None

    def useful(self, rollout: Rollout) -> PerSample:
        return (rollout.group >= 4 * NEEDED) & (rollout.group % 2 == 0)


class FiltersPrompts(RaggedGRPO):
    @node(type="filter")
    def hard(self, batch: WithDatasetRows) -> PerSample:
        return torch.tensor([is_hard(row) for row in batch.rows], dtype=torch.bool)


def test_prompts_are_chosen_before_the_policy_of_now_samples(policy: Path, tmp_path: Path) -> None:
    module = FiltersPrompts(
        CausalLM(str(policy), optimizer=SGD), OddCharacters(), group_size=GROUP, max_response_length=12
    )
    steps = fit(Fit(module, sums(10, NEEDED), tmp_path, settings={"max_steps": STEPS})).steps
    assert max(step["filter/draws"] for step in steps) > 1
    assert [step["rollout/staleness"] for step in steps] == [0.0] * STEPS


class AnswersNumbers(KeepsFew):
    def useful(self, rollout: Rollout) -> PerSample:
        return rollout.group


class TearsGroups(KeepsFew):
    def useful(self, rollout: Rollout) -> PerSample:
        return torch.arange(len(rollout.group)) != 2


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            KeepsFew,
            "filter `useful` has kept 2 of the 4 groups of a step after 5 draws (`module.max_draws`), 10.0% of those"
            " drawn; raise that, choose easier or harder prompts, or take more samples of each",
        ),
        (
            AnswersNumbers,
            "filter `useful` returned int64 of shape [6]; return one bool a row, `[B]`, such as a comparison gives",
        ),
        (
            TearsGroups,
            "filter `useful` keeps 2 of the 3 samples of group 0; groups are kept whole,"
            " so return the same for all samples of a prompt",
        ),
    ],
)
def test_every_rank_says_why_a_step_cannot_be_filled(
    kind: type[Picky], told: str, policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    module = picky(policy, kind)
    module.max_draws = 5
    for result in ranks2.run(failing_fit, Fit(module, sums(10, NEEDED), tmp_path, ZERO2)):
        assert result.error == told


class Notes(TransformersEngine):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def generate(self, *arguments: Any) -> list[Completion]:
        self.asked.append("generate")
        return super().generate(*arguments)

    def sleep(self, keep_weights: bool = False) -> None:
        self.asked.append("sleep")
        super().sleep(keep_weights)


def test_a_step_makes_all_allowed_draws_and_the_engine_sleeps_after_the_last(policy: Path, tmp_path: Path) -> None:
    module, engine = picky(policy, KeepsFew), Notes()
    module.max_draws = 6
    (step,) = fit(Fit(module, sums(10, NEEDED), tmp_path, engine=engine)).steps
    assert (step["filter/draws"], step["filter/kept"], step["filter/surplus"]) == (6.0, 4 / 24, 0.0)
    assert engine.asked == ["sleep"] + ["generate"] * 6 + ["sleep"]


class Epochs(OddCharacters):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def score(self, responses: RewardInput) -> Scores:
        self.seen.append(responses.state.epoch)
        return super().score(responses)


def test_a_reward_is_given_the_passes_of_all_draws(policy: Path, tmp_path: Path) -> None:
    module, reward = picky(policy), Epochs()
    module.reward = reward
    ran = fit(Fit(module, sums(10, NEEDED, held_out=2), tmp_path, settings={"max_steps": STEPS}))
    draws = int(sum(step["filter/draws"] for step in ran.steps))
    assert draws > STEPS
    # An epoch has 2 draws, of 4 of the 10 rows. Both validations score samples, and those at temperature 0.
    assert reward.seen == [0.0, 0.0, *(draw / 2 for draw in range(draws)), draws / 2, draws / 2]


def test_groups_are_kept_whole() -> None:
    ids = torch.tensor([7, 7, 2, 2])
    assert kept_groups("useful", torch.tensor([False, False, True, True]), ids).tolist() == [2]
    with pytest.raises(UserError, match="keeps 1 of the 2 samples of group 7;"):
        kept_groups("useful", torch.tensor([False, True, True, True]), ids)
