"""A module that remembers prompts, and chooses by it which ones an epoch draws."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from rlflow import Batch, CausalLM, PerSample, Rollout, node
from rlflow.data import MixedDataset, Mixture, PromptData
from rlflow.functional import group_has_signal
from rlflow.state import PromptMemory
from rlflow.types import Grouped, WithTexts
from tests.controller.runs import SGD, ZERO2, Fit, OddCharacters, RaggedGRPO, StopsAfter, failing_fit, fit, sums
from tests.ranks import RankPool

ROWS, PER_STEP, STEPS = 8, 2, 8
EVEN, ODD = {0, 2, 4, 6}, {1, 3, 5, 7}


class EvenAreSolved(OddCharacters):
    """A point for every response to an even row; less for the others, by their text."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return 1.0 if int(row["question"][0]) in EVEN else super().score_sample(text, row) % 3 / 4


class Curriculum(RaggedGRPO):
    """Leaves out prompts that were always solved; the hardest come first. Records the rows of each step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.solved = PromptMemory()
        self.record: list[list[int]] = []

    @node
    def remember(self, rollout: Rollout, rewards: PerSample) -> None:
        self.solved.update(rollout.group, rewards)
        self.record.append(self.all_rows(self.dataset_rows(rollout.group))[:: self.group_size].tolist())

    def choose_prompts(self, epoch: int, prompts: Tensor) -> Tensor:
        unsolved = prompts[self.solved.mean(prompts) != 1]  # those never seen are unsolved too
        return unsolved[self.solved.mean(unsolved).argsort(stable=True)]


class Undecided(Curriculum):
    """Chooses by what each rank has drawn at random."""

    def choose_prompts(self, epoch: int, prompts: Tensor) -> Tensor:
        return prompts[torch.randperm(len(prompts), generator=torch.Generator().manual_seed(id(self)))]


def run(policy: Path, folder: Path, kind: type[Curriculum] = Curriculum, strategy: Any = None, **settings: Any) -> Fit:
    module = kind(CausalLM(str(policy), optimizer=SGD), EvenAreSolved(), group_size=2, max_response_length=4)
    given = {"max_steps": STEPS, "save_every_n_steps": 1, **settings}
    data = sums(ROWS, PER_STEP)
    return (
        Fit(module, data, folder, settings=given)
        if strategy is None
        else Fit(module, data, folder, strategy, settings=given)
    )


def rows_of(steps: list[list[int]]) -> set[int]:
    return {row for step in steps for row in step}


def remembered(folder: Path) -> dict[str, Any]:
    """The state of the module in the last checkpoint of a run."""
    state: dict[str, Any] = json.loads((sorted(folder.glob("checkpoint/step-*"))[-1] / "state.json").read_text())
    return state["state"]["module"]


def numbers(step: dict[str, float]) -> dict[str, float]:
    return {name: x for name, x in step.items() if not name.startswith(("time/", "straggler"))}


def test_prompts_that_were_always_solved_are_left_out_of_later_epochs(policy: Path, tmp_path: Path) -> None:
    record = fit(run(policy, tmp_path)).record
    assert rows_of(record[:4]) == EVEN | ODD
    assert rows_of(record[4:6]) == rows_of(record[6:]) == ODD


def test_a_run_resumes_within_a_chosen_epoch_from_any_number_of_ranks(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    whole = fit(run(policy, tmp_path / "whole"))
    fit(run(policy, tmp_path / "1", callbacks=[StopsAfter(5)]))
    ranks2.run(fit, run(policy, tmp_path / "2", strategy=ZERO2, callbacks=[StopsAfter(5)]))
    alone = fit(run(policy, tmp_path / "1", ckpt_path="last", callbacks=[StopsAfter(0)]))
    assert alone.record == whole.record[5:]
    assert [numbers(step) for step in alone.steps] == [numbers(step) for step in whole.steps[5:]]
    assert (
        fit(run(policy, tmp_path / "2", ckpt_path="last", callbacks=[StopsAfter(0)])).record == whole.record[5:]
    )  # two ranks, then one


def test_with_steps_that_overlap_an_epoch_is_chosen_by_those_trained_by_then(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    given: dict[str, Any] = {"strategy": ZERO2, "placement": {"rollout": 0, "actor": 1}, "max_staleness": 1}
    whole, trained = ranks2.run(fit, run(policy, tmp_path / "whole", **given))
    # The second epoch begins with step 5, when steps 1 to 3 are trained: what step 4 solved is not known.
    left_out = rows_of(whole.record[:3]) & EVEN
    assert len(left_out) == 4 - len(set(whole.record[3]) & EVEN)
    second = (ROWS - len(left_out)) // PER_STEP
    assert not rows_of(whole.record[4 : 4 + second]) & left_out
    ranks2.run(fit, run(policy, tmp_path / "parts", **given, callbacks=[StopsAfter(5)]))
    rest, trained_rest = ranks2.run(
        fit, run(policy, tmp_path / "parts", **given, ckpt_path="last", callbacks=[StopsAfter(0)])
    )
    assert remembered(tmp_path / "parts") == remembered(tmp_path / "whole")
    assert rest.record == whole.record[6:]  # step 6 was generated before the run was stopped
    assert [numbers(step) for step in trained_rest.steps] == [numbers(step) for step in trained.steps[5:]]


def test_ranks_that_choose_other_prompts_end_in_one_line(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    for result in ranks2.run(failing_fit, run(policy, tmp_path, Undecided, strategy=ZERO2)):
        assert result.error.startswith("`choose_prompts` chose other rows of epoch 1 on other ranks; let them follow")


def test_a_module_that_chooses_is_not_run_by_epochs(policy: Path, tmp_path: Path) -> None:
    result = failing_fit(run(policy, tmp_path, max_steps=None, max_epochs=2))
    assert "`choose_prompts` decides how many prompts an epoch has" in result.error


def test_weights_of_each_step_do_not_go_with_prompts_of_whole_epochs(policy: Path, tmp_path: Path) -> None:
    rows = [{"question": "1="}]
    source = Mixture({"a": MixedDataset(rows, [(0, 1.0), (4, 0.0)]), "b": MixedDataset(rows)})
    result = failing_fit(replace(run(policy, tmp_path), data=PromptData(source, None, 2)))
    assert result.error.startswith("a dataset's `weight` has a schedule of steps, and the module's `choose_prompts`")


class GroupedTexts(Grouped, WithTexts, Protocol):
    pass


class Selective(Curriculum):
    """Trains on groups that differ, and remembers those too that it drops."""

    remember = None

    def rewards(self, rollout: GroupedTexts) -> PerSample:
        rewards = self.reward_function(rollout)
        self.solved.update(rollout.group, rewards)
        self.record.append(self.dataset_rows(rollout.group)[:: self.group_size].tolist())
        return rewards

    @node(type="filter")
    def useful(self, rollout: Rollout, rewards: PerSample) -> PerSample:
        return group_has_signal(rewards, rollout.group)


def test_a_filter_s_draws_go_from_epoch_to_epoch_and_on_from_a_checkpoint(policy: Path, tmp_path: Path) -> None:
    given = {"kind": Selective, "max_steps": 6}
    whole = fit(run(policy, tmp_path / "whole", **given))
    assert rows_of(whole.record[:4]) == EVEN | ODD
    assert rows_of(whole.record[-2:]) <= ODD  # an epoch that begins within a step knows the steps before
    fit(run(policy, tmp_path / "parts", **given, callbacks=[StopsAfter(2)]))
    rest = fit(run(policy, tmp_path / "parts", **given, ckpt_path="last", callbacks=[StopsAfter(0)]))
    assert rest.record == whole.record[-len(rest.record) :]
    assert [numbers(step) for step in rest.steps] == [numbers(step) for step in whole.steps[2:]]


class Plain(Curriculum):
    """Draws all prompts."""

    choose_prompts = RaggedGRPO.choose_prompts


CHANGES: dict[str, tuple[type[Curriculum], type[Curriculum], int, str]] = {
    "begins to choose": (
        Plain,
        Curriculum,
        PER_STEP,
        "was made without `choose_prompts` or `data.curriculum`, and this run has one",
    ),
    "chooses no more": (
        Curriculum,
        Plain,
        PER_STEP,
        "was made with `choose_prompts` or `data.curriculum`, and this run has none",
    ),
    "takes more": (Curriculum, Curriculum, 4, "`data.prompts_per_step` is 4, and .* chose prompts for steps of 2"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_that_chooses_otherwise_than_its_checkpoint_is_refused(change: str, policy: Path, tmp_path: Path) -> None:
    before, after, per_step, message = CHANGES[change]
    fit(run(policy, tmp_path, before, max_steps=1))
    resumed = replace(run(policy, tmp_path, after, ckpt_path="last"), data=sums(ROWS, per_step))
    assert re.search(message, failing_fit(resumed).error)


class Twice(RaggedGRPO):
    """Remembers at two places of the graph; ranks of the actor run one of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen = PromptMemory()

    @node
    def first(self, rollout: Rollout, rewards: PerSample) -> None:
        self.seen.update(rollout.group, rewards * 0.1)

    @node(role="actor")
    def second(self, rollout: Rollout, rewards: PerSample) -> None:
        self.seen.update(rollout.group, 1 / (1 + rewards + rollout.lengths))


def test_memories_are_the_same_to_the_bit_where_nodes_run_on_other_ranks(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    def twice() -> Twice:
        return Twice(CausalLM(str(policy), optimizer=SGD), OddCharacters(), group_size=4, max_response_length=4)

    saved: dict[str, Any] = {"save_every_n_steps": 1}
    apart = {**saved, "placement": {"rollout": 0, "actor": 1}}
    fit(Fit(twice(), sums(ROWS, 4), tmp_path / "1", settings=saved))
    ranks2.run(fit, Fit(twice(), sums(ROWS, 4), tmp_path / "2", ZERO2, settings=apart))
    assert remembered(tmp_path / "2") == remembered(tmp_path / "1")


class Measures(Curriculum):
    """Asks in validation for places in the dataset of the training rows."""

    def validation_step(self, batch: Batch) -> None:
        self.dataset_rows(torch.zeros(len(batch.rows), dtype=torch.int64))


def test_validation_asks_for_no_places_in_the_training_rows(policy: Path, tmp_path: Path) -> None:
    result = failing_fit(replace(run(policy, tmp_path, Measures), data=sums(ROWS, PER_STEP, held_out=2)))
    assert result.error.startswith("`dataset_rows` was called in validation, whose prompts are not those of")
