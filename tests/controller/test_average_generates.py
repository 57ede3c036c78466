"""A moving average that generates: its engines have the weights that it has, at each of its moves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlflow import Batch, CausalLM, Optimizer, PerToken, RLModule, Rollout, node
from rlflow.rollout.assignment import Share
from rlflow.run.placement import Place
from rlflow.strategies import TrainingStrategy
from rlflow.types import After, Tokens
from tests.controller.policies import STOPS, paths_of
from tests.controller.runs import ZERO2, Fit, Lies, Result, StopsAfter, failing_fit, fit, sums
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.strategy_update import Stage, strategy_of

STEPS = 3
Made = dict[tuple[int, ...], list[int]]


class FromAverage(RLModule):
    """The policy learns from what its average samples; then the average samples again."""

    group_size = 2
    max_response_length = 8
    stop_token_ids = STOPS

    def __init__(self, model: Path, decay: float = 0.0, start_step: int = 0) -> None:
        adamw = Optimizer("adamw", lr=3e-3)
        self.actor = CausalLM(str(model), optimizer=adamw, samples_per_update=3, start_step=start_step)
        self.decay = decay
        self.record: dict[str, list[Made]] = {"rollout": [], "again": []}

    def configure_models(self) -> None:
        self.teacher = self.actor.averaged(self.decay)

    @node(generates="teacher")
    def rollout(self, batch: Batch) -> Rollout:
        return self.recorded("rollout", self.teacher.generate(batch, n=2))

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Rollout) -> PerToken:
        return -self.actor.logprobs(rollout)

    @node(generates="teacher")
    def again(self, batch: Batch, actor_loss: After) -> Rollout:
        return self.recorded("again", self.teacher.generate(batch, n=2))

    def recorded(self, name: str, rollout: Rollout) -> Rollout:
        tokens = zip(rollout.response_ids.tolist(), rollout.lengths.tolist(), strict=True)
        made = [row[:length] for row, length in tokens]
        self.record[name].append(dict(zip(paths_of(rollout), made, strict=True)))
        return rollout


class FromActor(FromAverage):
    """The same with the policy itself."""

    def configure_models(self) -> None:
        """There is no average."""

    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        return self.recorded("rollout", self.actor.generate(batch, n=2))

    @node(generates="actor")
    def again(self, batch: Batch, actor_loss: After) -> Rollout:
        return self.recorded("again", self.actor.generate(batch, n=2))


class Scores(FromAverage):
    """The average scores its own responses; the node reads only their tokens."""

    again = None  # type: ignore[assignment]

    @node(role="teacher")
    def ref_logprobs(self, rollout: Tokens) -> PerToken:
        return self.teacher.logprobs(rollout)

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Rollout, ref_logprobs: PerToken) -> PerToken:
        return -self.actor.logprobs(rollout) - 0 * ref_logprobs


class FromBoth(FromAverage):
    """The policy samples first, its average after it has learned."""

    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        return self.recorded("rollout", self.actor.generate(batch, n=2))


def run(module: RLModule, folder: Path, **given: Any) -> Fit:
    settings = {"max_steps": STEPS, "save_every_n_steps": 9, **given.pop("settings", {})}
    return Fit(module, sums(12, prompts_per_step=3), folder, settings=settings, **given)


def tokens(results: list[Result]) -> dict[str, list[Made]]:
    """The tokens that each node generated in each step, over all ranks."""
    names = results[0].record
    steps = {name: zip(*(result.record[name] for result in results), strict=True) for name in names}
    return {name: [{k: v for rank in step for k, v in rank.items()} for step in of] for name, of in steps.items()}


@pytest.fixture(scope="module")
def alone(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The samples of the policy itself."""
    return fit(run(FromActor(policy), tmp_path_factory.mktemp("actor") / "run"))


def test_an_average_that_keeps_nothing_samples_as_the_policy_that_it_follows(
    policy: Path, alone: Result, tmp_path: Path
) -> None:
    found = fit(run(FromAverage(policy), tmp_path))
    assert tokens([found]) == tokens([alone])
    assert [step["actor/loss"] for step in found.steps] == [step["actor/loss"] for step in alone.steps]
    again = alone.record["again"]
    assert all(before != after for before, after in zip(alone.record["rollout"], again, strict=True))


def test_the_average_moves_from_the_first_step_that_trains_its_owner(policy: Path, tmp_path: Path) -> None:
    average, owner = (
        fit(run(kind(policy, start_step=1), tmp_path / kind.__name__)) for kind in (FromAverage, FromActor)
    )
    assert tokens([average]) == tokens([owner])
    first, second = (owner.record[name] for name in ("rollout", "again"))
    assert [before != after for before, after in zip(first, second, strict=True)] == [True] * 3
    assert "actor/loss" not in average.steps[0]


def test_the_average_s_scores_of_its_own_rows_are_compared_with_its_engine(policy: Path, tmp_path: Path) -> None:
    found = fit(run(Scores(policy, decay=0.5), tmp_path))
    assert all(0 < step["sync/logprob_gap"] < 1e-5 for step in found.steps)


@pytest.mark.parametrize("stage", slow_but((3,), [2, 3, "fsdp"]))
def test_the_average_moves_on_two_ranks_as_on_one(
    stage: Stage, policy: Path, alone: Result, tmp_path: Path, ranks2: RankPool
) -> None:
    strategy: partial[TrainingStrategy] = partial(strategy_of, stage, token_budget=40)
    assert tokens(ranks2.run(fit, run(FromAverage(policy), tmp_path, strategy=strategy))) == tokens([alone])


def test_engines_on_ranks_of_their_own_get_each_move_of_the_average(
    policy: Path, alone: Result, tmp_path: Path, ranks2: RankPool
) -> None:
    settings = {"placement": {"rollout": Place(0), "actor": Place(1)}}
    module = run(FromAverage(policy), tmp_path, strategy=ZERO2, settings=settings)
    generates, trains = ranks2.run(fit, module)
    assert tokens([generates]) == tokens([alone])
    assert trains.record["again"] == []


def test_the_average_s_engine_is_compared_with_it_after_each_move(policy: Path, alone: Result, tmp_path: Path) -> None:
    found = fit(run(FromAverage(policy, decay=0.5), tmp_path))
    assert all(0 < step["sync/logprob_gap"] < 1e-5 for step in found.steps)
    assert found.record["rollout"][0] == alone.record["rollout"][0]  # both begin with the model's files
    assert found.record["again"] != alone.record["again"]


def test_an_engine_that_keeps_the_average_of_before_is_caught(policy: Path, tmp_path: Path) -> None:
    found = failing_fit(run(FromAverage(policy, decay=0.5), tmp_path, engine=Lies()))
    assert "rollout and training logprobs differ by" in found.error
    assert not found.steps


def test_the_policy_and_its_average_share_an_engine_in_turns(policy: Path, tmp_path: Path) -> None:
    own, shared = (
        fit(run(FromBoth(policy, decay=0.5), tmp_path / name, settings={"engines": engines}))
        for name, engines in (("own", {}), ("shared", {"teacher": Share("actor")}))
    )
    assert tokens([shared]) == tokens([own])
    assert shared.steps[-1]["sync/logprob_gap/teacher"] == pytest.approx(own.steps[-1]["sync/logprob_gap/teacher"])


def test_a_resumed_run_samples_from_the_average_that_it_had(policy: Path, tmp_path: Path) -> None:
    whole = fit(run(FromAverage(policy, decay=0.5), tmp_path / "whole"))
    fit(run(FromAverage(policy, decay=0.5), tmp_path / "parts", settings={"callbacks": [StopsAfter(2)]}))
    rest = fit(run(FromAverage(policy, decay=0.5), tmp_path / "parts", settings={"ckpt_path": "last"}))
    assert rest.record["rollout"] == whole.record["rollout"][2:]
    assert rest.record["again"] == whole.record["again"][2:]
