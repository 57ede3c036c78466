"""A policy that generates again when it has been trained, in whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rlflow import Batch, CausalLM, Optimizer, PerSample, PerToken, RLModule, Rollout, node
from rlflow.types import After, WithLossMask
from tests.controller.runs import ZERO2, Fit, Lies, Result, failing_fit, fit, sums
from tests.controller.test_ranks import FLOAT32, difference
from tests.ranks import RankPool

STEPS, NEEDED = 3, 4


class Twice(RLModule):
    """Two trainings of the policy in a step, each of what it wrote just before; from the second step on."""

    max_response_length = 8
    stop_token_ids = tuple(range(40, 60))

    def __init__(self, model: str) -> None:
        self.model = model
        self.record: dict[str, list[Any]] = {}

    def configure_models(self) -> None:
        self.actor = CausalLM(self.model, optimizer=Optimizer("adamw", lr=3e-3), start_step=1)

    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        return self.actor.generate(batch, n=2)

    @node(role="actor")
    def logprobs(self, rollout: Rollout) -> PerToken:
        self._note("versions", rollout.version)
        return self._compared(rollout)

    @node(role="actor", type="train")
    def first_loss(self, rollout: Rollout, logprobs: PerToken) -> PerToken:
        return self.actor.logprobs(rollout) - logprobs

    @node(generates="actor")
    def again(self, batch: Batch, first_loss: After) -> Rollout:
        self._note("trained", first_loss)
        return self.actor.generate(batch, n=3)

    @node(role="actor")
    def again_logprobs(self, again: Rollout) -> PerToken:
        self._note("versions again", again.version)
        return self._compared(again)

    @node(role="actor", type="train")
    def last_loss(self, again: Rollout, again_logprobs: PerToken) -> PerToken:
        return self.actor.logprobs(again) - again_logprobs

    def _compared(self, rollout: Rollout) -> Tensor:
        """The engine's logprobs of its tokens equal the trainer's now."""
        logprobs = self.actor.logprobs(rollout)
        self._note("gap", ((logprobs - rollout.logprobs).abs() * rollout.loss_mask).max())
        return logprobs

    def _note(self, name: str, x: Any) -> None:
        self.record.setdefault(name, []).append(x.tolist() if isinstance(x, Tensor) else x)


@pytest.fixture(scope="module")
def runs(policy: Path, tmp_path_factory: pytest.TempPathFactory, ranks2: RankPool) -> dict[str, list[Result]]:
    folder = tmp_path_factory.mktemp("trained")

    def run(name: str, **given: Any) -> Fit:
        settings = {"max_steps": STEPS, **given.pop("settings", {})}
        return Fit(Twice(str(policy)), sums(12, NEEDED), folder / name, settings=settings, **given)

    apart = {"placement": {"actor.rollout": 0, "actor": 1}}
    return {
        "1 rank": [fit(run("1"))],
        "2 ranks": ranks2.run(fit, run("2", strategy=ZERO2)),
        "apart": ranks2.run(fit, run("apart", strategy=ZERO2, settings=apart)),
    }


@pytest.mark.parametrize("ranks", ["1 rank", "2 ranks", "apart"])
def test_rows_of_each_training_are_of_the_weights_just_before_it(runs: dict[str, list[Result]], ranks: str) -> None:
    record = runs[ranks][-1].record
    assert [set(versions) for versions in record["versions"]] == [{0}, {0}, {2}]
    assert [set(versions) for versions in record["versions again"]] == [{0}, {1}, {3}]
    assert len(record["gap"]) == 2 * STEPS
    assert max(record["gap"]) < 1e-4


def test_a_node_with_an_after_parameter_receives_an_after_of_the_training(runs: dict[str, list[Result]]) -> None:
    assert runs["1 rank"][0].record["trained"] == [After()] * STEPS


@pytest.mark.parametrize("ranks", ["2 ranks", "apart"])
def test_trainings_in_a_step_are_alike_on_one_rank_and_on_two(runs: dict[str, list[Result]], ranks: str) -> None:
    assert difference(runs[ranks][-1].weights, runs["1 rank"][0].weights) < 10 * FLOAT32


class OnlyRead(RLModule):
    """The responses of the trained policy are read, and its model does not score them."""

    max_response_length = 8

    def __init__(self, model: str) -> None:
        self.model = model

    def configure_models(self) -> None:
        self.actor = CausalLM(self.model, optimizer=Optimizer("adamw", lr=3e-2))

    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        return self.actor.generate(batch)

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Rollout) -> PerToken:
        return -self.actor.logprobs(rollout)

    @node(generates="actor")
    def again(self, batch: Batch, actor_loss: After) -> Rollout:
        return self.actor.generate(batch)

    @node
    def length(self, again: WithLossMask) -> PerSample:
        self.log("read/length", again.lengths.double())
        return again.lengths


def test_stale_weights_after_a_training_are_noticed_though_no_row_is_scored(policy: Path, tmp_path: Path) -> None:
    result = failing_fit(Fit(OnlyRead(str(policy)), sums(12, NEEDED), tmp_path, engine=Lies()))
    assert "the rollout engine holds other weights than the trainer" in result.error
    fit(Fit(OnlyRead(str(policy)), sums(12, NEEDED), tmp_path / "healthy"))
