"""Runs whose prompts are chosen by measured pass rates, as `data.curriculum` says."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow import CausalLM, PerSample, node
from rlflow.algorithms import SFT, OnPolicyDistillation, SelfPlay
from rlflow.data import PromptData
from rlflow.functional import group_has_signal
from rlflow.module import RLModule
from rlflow.rewards import CallableReward
from rlflow.state import Curriculum
from rlflow.types import Grouped, WithTexts
from tests.controller.runs import SGD, ZERO2, Fit, RaggedGRPO, StopsAfter, failing_fit, fit
from tests.controller.test_prompt_memory import numbers, remembered
from tests.ranks import RankPool

ROWS, PER_STEP, GROUP, STEPS = 18, 3, 4, 10
EPOCH = ROWS // PER_STEP  # steps of the first one
Record = list[tuple[list[int], list[float]]]


def by_kind(response: str, prompt: str) -> float:
    """A third of the prompts always pass by a reward of 0.5, a third never, and the others as their response has it."""
    always, never, at_times = 0.75, 0.25, float(sum(map(ord, response)) % 2)
    return (always, never, at_times)[int(prompt[:-1]) % 3]


class Records(RaggedGRPO):
    """Records of each step the rows that were drawn, over all ranks, and their rewards."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.record: Record = []

    @node
    def look(self, rollout: Grouped, rewards: PerSample) -> None:
        rows = self.all_rows(self.dataset_rows(rollout.group)).tolist()
        self.record.append((rows, self.all_rows(rewards).tolist()))


def run(policy: Path, folder: Path, kind: type[Any] = Records, strategy: Any = None, **settings: Any) -> Fit:
    module = kind(
        CausalLM(str(policy), optimizer=SGD), CallableReward(by_kind), group_size=GROUP, max_response_length=4
    )
    data = PromptData([{"prompt": f"{i}="} for i in range(ROWS)], None, PER_STEP, curriculum=curriculum())
    given = {"max_steps": STEPS, "save_every_n_steps": 1, **settings}
    made = Fit(module, data, folder, settings=given)
    return made if strategy is None else replace(made, strategy=strategy)


def curriculum() -> Curriculum:
    return Curriculum(min_pass_rate=0.2, max_pass_rate=0.8, pass_reward=0.5, recheck=0.0)


def passed(record: Record) -> Counter[int]:
    """Number of samples of each row that passed."""
    return Counter(row for rows, rewards in record for row, reward in zip(rows, rewards, strict=True) if reward >= 0.5)


def drawn(record: Record) -> set[int]:
    return {row for rows, _ in record for row in rows}


def test_the_second_epoch_draws_the_prompts_whose_pass_rate_is_in_the_range(policy: Path, tmp_path: Path) -> None:
    result = fit(run(policy, tmp_path))
    first, rest = result.record[:EPOCH], result.record[EPOCH:]
    assert drawn(first) == {*range(ROWS)}
    # Of four samples one, two or three: those of the rows that pass at times, unless all four are alike.
    inside = {row for row, count in passed(first).items() if 1 <= count <= 3}
    assert PER_STEP <= len(inside) <= ROWS / 3
    assert drawn(rest[: len(inside) // PER_STEP]) <= inside
    begins = result.steps[EPOCH]
    assert begins["data/chosen"] == pytest.approx(len(inside) / ROWS)
    hard = sum(passed(first)[row] == 0 for row in range(ROWS))
    assert begins["curriculum/too_hard"] == pytest.approx(hard / ROWS)
    assert begins["curriculum/too_easy"] == pytest.approx(1 - (hard + len(inside)) / ROWS)
    shares = [step["curriculum/pass_rate"] for step in result.steps]
    assert shares == pytest.approx([passed([step]).total() / (PER_STEP * GROUP) for step in result.record])


def test_a_run_resumes_to_the_bit_from_three_ranks(policy: Path, tmp_path: Path, ranks3: RankPool) -> None:
    whole = fit(run(policy, tmp_path / "whole"))
    stop = EPOCH + 1
    ranks3.run(fit, run(policy, tmp_path / "3", strategy=ZERO2, callbacks=[StopsAfter(stop)]))
    fit(run(policy, tmp_path / "1", callbacks=[StopsAfter(stop)]))
    assert remembered(tmp_path / "3")["data_curriculum"] == remembered(tmp_path / "1")["data_curriculum"]
    rest = fit(run(policy, tmp_path / "1", ckpt_path="last"))
    assert rest.record == whole.record[stop:]
    assert [numbers(step) for step in rest.steps] == [numbers(step) for step in whole.steps[stop:]]
    of_three = fit(run(policy, tmp_path / "3", ckpt_path="last"))
    assert [rows for rows, _ in of_three.record] == [rows for rows, _ in whole.record[stop:]]


class Filters(Records):
    """Drops groups whose rewards are all equal; the curriculum measures these too."""

    look = None

    @node
    def rewards(self, rollout: WithTexts) -> PerSample:
        return self.reward_function(rollout)

    @node(type="filter")
    def useful(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        rows = self.all_rows(self.dataset_rows(rollout.group)).tolist()
        self.record.append((rows, self.all_rows(rewards).tolist()))
        return group_has_signal(rewards, rollout.group)


def test_groups_that_a_filter_drops_are_measured_too(policy: Path, tmp_path: Path) -> None:
    record = fit(run(policy, tmp_path, Filters, max_steps=4)).record
    assert drawn(record) == {*range(ROWS)}  # twelve of them never give a signal, and are in no step
    assert remembered(tmp_path)["data_curriculum"]["prompts"] == [*range(ROWS)]


def fails_on_row_5(response: str, prompt: str) -> float:
    assert prompt != "5="
    return by_kind(response, prompt)


def test_samples_that_a_reward_fails_on_and_drops_are_not_measured(policy: Path, tmp_path: Path) -> None:
    made = run(policy, tmp_path, RaggedGRPO, max_steps=EPOCH)
    made.module.reward = CallableReward(fails_on_row_5, on_error="drop")
    fit(made)
    assert remembered(tmp_path)["data_curriculum"]["prompts"] == [row for row in range(ROWS) if row != 5]


class Silent(Records):
    """Scores under another name."""

    @node
    def rewards(self, rollout: WithTexts) -> PerSample:
        return self.reward_function(rollout, "mine")


class Chooses(Records):
    def choose_prompts(self, epoch: int, prompts: torch.Tensor) -> torch.Tensor:
        return prompts


REFUSED: dict[str, tuple[Any, str]] = {
    "learns responses": (lambda model: SFT(model), "SFT samples no responses that could pass; leave it out"),
    "no reward": (
        lambda model: OnPolicyDistillation(model, teacher=model.model),
        "OnPolicyDistillation has neither a `reward` nor",
    ),
    "own prompts": (
        lambda model: SelfPlay(model, model, reward=CallableReward(by_kind)),
        "SelfPlay writes prompts of its own",
    ),
    "chooses": (lambda model: Chooses(model, CallableReward(by_kind)), "Chooses chooses prompts itself"),
    "another name": (
        lambda model: Silent(model, CallableReward(by_kind), max_response_length=4),
        "no sample of the first step has a reward",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_where_a_pass_rate_has_no_meaning_a_curriculum_is_refused(why: str, policy: Path, tmp_path: Path) -> None:
    make, message = REFUSED[why]
    data = PromptData([{"prompt": f"{i}=", "response": "1"} for i in range(4)], None, 2, curriculum=curriculum())
    error = failing_fit(Fit(make(CausalLM(str(policy), optimizer=SGD)), data, tmp_path)).error
    assert error.startswith("`data.curriculum` is set, and ")
    assert re.search(message, error)


def test_a_curriculum_is_not_run_by_epochs(policy: Path, tmp_path: Path) -> None:
    error = failing_fit(run(policy, tmp_path, max_steps=None, max_epochs=1)).error
    assert "`data.curriculum` decides how many prompts an epoch has" in error


def test_a_checkpoint_with_a_curriculum_gives_its_module_to_a_run_without(policy: Path, tmp_path: Path) -> None:
    fit(run(policy, tmp_path, max_steps=1))
    module: RLModule = run(policy, tmp_path).module
    module.load_state_dict(remembered(tmp_path))
    assert module.data_curriculum is None
