"""The number of updates or steps in a learning-rate schedule that ends with the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rlflow import Batch, CausalLM, Harness, Optimizer, PerToken, RLModule, Rollout, UserError, node
from rlflow.algorithms import GRPO, SelfPlay
from rlflow.run.prepare import read_graph
from rlflow.run.schedules import check_schedules, counted
from tests.controller.runs import Fit, OddCharacters, fit, sums

LINEAR = Optimizer(schedule="linear")


@dataclass(eq=False)
class Samples(RLModule):
    """Trained on `n` samples of each prompt, while the run knows of `group_size`."""

    actor: CausalLM
    group_size: int = 4
    n: int = 4
    max_response_length: int = 4

    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        return self.actor.generate(batch, n=self.n)

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Rollout) -> PerToken:
        return -self.actor.logprobs(rollout)


@dataclass(eq=False)
class SamplesOfSamples(Samples):
    """Trained on what is sampled below."""

    @node(generates="actor")
    def further(self, rollout: Rollout) -> Rollout:
        return self.actor.generate(rollout, n=2)

    @node(role="actor", type="train")
    def actor_loss(self, further: Rollout) -> PerToken:
        return -self.actor.logprobs(further)


def counts(module: RLModule, steps: int = 10) -> int | None:
    return counted(module, read_graph(module), "actor", prompts=3, steps=steps)


def test_updates_are_those_of_all_epochs_and_mini_batches() -> None:
    assert counts(Samples(CausalLM("tiny", epochs=2))) == 20
    # 3 prompts x 4 samples in mini-batches of 5
    assert counts(Samples(CausalLM("tiny", epochs=2, samples_per_update=5, start_step=4))) == 6 * 2 * 3


def test_steps_are_counted_where_the_schedule_says_so() -> None:
    by_steps = Optimizer(schedule="linear", interval="steps")
    model = CausalLM("tiny", epochs=2, samples_per_update=5, start_step=4, optimizer=by_steps)
    assert counts(Samples(model)) == counts(SamplesOfSamples(model)) == 6


def test_an_update_on_all_rows_is_one_whatever_their_number() -> None:
    assert counts(SamplesOfSamples(CausalLM("tiny", epochs=2))) == 20


def test_a_schedule_is_refused_where_only_the_run_knows_its_number_of_updates() -> None:
    module = SamplesOfSamples(CausalLM("tiny", samples_per_update=5, optimizer=LINEAR))
    assert counts(module) is None
    line = (
        "`actor.optimizer.schedule` is 'linear' and ends with the last update, and `actor_loss` trains on rows of"
        " `further`, whose number only the run knows; set `actor.optimizer.interval` to 'steps', or"
        " `actor.samples_per_update` to null"
    )
    with pytest.raises(UserError) as refused:
        check_schedules(module, read_graph(module), prompts=3)
    assert str(refused.value) == line
    check_schedules(SamplesOfSamples(CausalLM("tiny", samples_per_update=5)), read_graph(module), prompts=3)


def test_the_episodes_of_agents_are_counted_where_an_update_is_of_episodes() -> None:
    actor = CausalLM("tiny", samples_per_update=5)
    module = GRPO(actor, group_size=4, environment=Harness("tests.harness.agents.talks"))
    assert counts(module) is None  # an episode has any number of rows
    module.loss_aggregation = "episode-mean"
    assert counts(module) == 10 * 3  # 3 prompts x 4 episodes, in updates of 5


class Unmasked(Samples):
    """From whose samples nothing is learnt, so that no update is made."""

    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        rollout = self.actor.generate(batch, n=self.n)
        return replace(rollout, loss_mask=torch.zeros_like(rollout.loss_mask))


class Recorded(torch.optim.SGD):
    """Notes the learning rate of each update."""

    rates: ClassVar[list[float]] = []

    def step(self, closure: Any = None) -> None:
        self.rates.append(self.param_groups[0]["lr"])


@pytest.mark.parametrize(("by", "rates"), [("updates", [6, 5, 4, 3, 2, 1]), ("steps", [6, 6, 4, 4, 2, 2])])
def test_the_rate_falls_with_updates_or_with_steps(by: Any, rates: list[int], tmp_path: Path) -> None:
    Recorded.rates.clear()
    optimizer = Optimizer(f"{__name__}.Recorded", lr=6e-3, schedule="linear", interval=by)
    module = Samples(CausalLM("tiny", samples_per_update=4, optimizer=optimizer), group_size=2, n=2)
    fit(Fit(module, sums(8, 4), tmp_path / "run", settings={"max_steps": 3}))  # two updates a step
    of_memory_table, *of_run = Recorded.rates  # the table measures what such an optimizer keeps of a small weight
    assert of_memory_table == 6e-3
    assert of_run == pytest.approx([rate * 1e-3 for rate in rates])


def test_fewer_updates_than_scheduled_end_the_run_at_its_first_trained_step(tmp_path: Path) -> None:
    optimizer = Optimizer("sgd", lr=1e-3, schedule="linear")
    module = Samples(CausalLM("tiny", samples_per_update=4, start_step=1, optimizer=optimizer), group_size=3, n=1)
    # 4 prompts, 1 sample of each in mini-batches of 4, where 12 samples are counted
    with pytest.raises(UserError, match=r"`actor` would make 1 updates in step 2, and .* counts 3 in each step, from"):
        fit(Fit(module, sums(8, 4), tmp_path / "run", settings={"max_steps": 3}))


def test_updates_that_are_skipped_are_counted(tmp_path: Path) -> None:
    optimizer = Optimizer("sgd", lr=1e-3, schedule="linear")
    module = Unmasked(CausalLM("tiny", samples_per_update=4, optimizer=optimizer), group_size=2, n=2)
    assert len(fit(Fit(module, sums(8, 4), tmp_path / "run", settings={"max_steps": 2})).steps) == 2


def test_updates_are_not_counted_by_the_group_size_where_several_nodes_generate() -> None:
    solver, proposer = CausalLM("tiny"), CausalLM("tiny", samples_per_update=4, optimizer=LINEAR)
    module = SelfPlay(solver, proposer, OddCharacters(), questions=4, answers=8)
    assert counted(module, read_graph(module), "proposer", prompts=2, steps=1) is None
    with pytest.raises(UserError, match=r"`proposer_loss` trains on rows of `question`, whose number only the run"):
        check_schedules(module, read_graph(module), prompts=2)


def test_more_updates_than_a_schedule_counts_end_the_run(tmp_path: Path) -> None:
    optimizer = Optimizer("sgd", lr=1e-3, schedule="linear")
    module = Samples(CausalLM("tiny", samples_per_update=4, optimizer=optimizer), group_size=1, n=3)
    line = r"`actor` would make 3 updates in step 1, and .* counts 1 in each step, from"
    with pytest.raises(UserError, match=line) as refused:
        fit(Fit(module, sums(8, 4), tmp_path / "run", settings={"max_steps": 2}))
    assert "`module.group_size` 1; set `actor.optimizer.interval` to 'steps'" in str(refused.value)
