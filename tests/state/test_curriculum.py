"""Prompts that are chosen by the share of their samples that passed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlflow import UserError
from rlflow.state import Curriculum, PromptMemory

NEVER, SELDOM, AT_TIMES, ALWAYS, UNSEEN = range(5)


def measured(per_step: int = 1, **settings: Any) -> Curriculum:
    """Five samples of each of four prompts, with none, one, three and five that passed; a fifth prompt has none."""
    curriculum = Curriculum(**settings).begun(per_step)
    passed = [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    curriculum.learn(torch.arange(4).repeat_interleave(5), torch.tensor(passed, dtype=torch.float64).flatten())
    return curriculum


ALL = torch.tensor([ALWAYS, UNSEEN, SELDOM, NEVER, AT_TIMES])


def test_an_epoch_draws_prompts_in_the_range_and_those_never_seen_in_their_order() -> None:
    assert measured(recheck=0.0).choose(1, ALL).tolist() == [UNSEEN, SELDOM, AT_TIMES]  # 0.2 is in a range from 0.2
    narrow = measured(recheck=0.0, min_pass_rate=0.3, max_pass_rate=1.0)
    assert narrow.choose(1, ALL).tolist() == [ALWAYS, UNSEEN, AT_TIMES]
    assert narrow.shares(ALL) == (0.4, 0.0)
    assert measured().shares(ALL) == (0.2, 0.2)


def test_the_nearest_to_the_range_fill_a_step() -> None:
    narrow = {"recheck": 0.0, "min_pass_rate": 0.5, "max_pass_rate": 0.6}  # 0.3, 0.5 and 0.4 away
    assert measured(3, **narrow).choose(1, ALL).tolist() == [UNSEEN, SELDOM, AT_TIMES]
    assert measured(4, **narrow).choose(1, ALL).tolist() == [ALWAYS, UNSEEN, SELDOM, AT_TIMES]


def test_a_share_of_the_others_is_drawn_by_chance_that_follows_from_the_epoch() -> None:
    curriculum = Curriculum(recheck=0.25).begun(1)
    prompts = torch.arange(4000)
    curriculum.learn(prompts, torch.zeros(4000, dtype=torch.float64))
    first, second = curriculum.choose(1, prompts), curriculum.choose(2, prompts)
    assert curriculum.choose(1, prompts).equal(first)
    for drawn in (first, second):
        assert 900 < len(drawn) < 1100  # 1000, with a deviation of 27
    both = len({*first.tolist()} & {*second.tolist()})
    assert 190 < both < 310  # a sixteenth of all, 250, with a deviation of 15


def test_earlier_samples_weigh_less() -> None:
    memory = PromptMemory(decay=0.5)
    memory.learn(torch.tensor([0, 0, 1]), torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))
    memory.learn(torch.tensor([0, 0]), torch.tensor([1.0, 1.0], dtype=torch.float64))
    prompts = torch.tensor([0, 1])
    assert memory.count(prompts).tolist() == [3.0, 1.0]  # two samples that weigh a half each, and two new ones
    assert memory.mean(prompts).tolist() == pytest.approx([5 / 6, 1.0])
    # The numbers 0, 1, 1, 1 weigh 1/2, 1/2, 1, 1: (25/72 + 1/72 + 2/36) / (3 - 1) = 5/24
    assert memory.std(prompts)[0].item() == pytest.approx((5 / 24) ** 0.5)
    last = PromptMemory(decay=0.0)
    for x in (0.0, 1.0):
        last.learn(torch.tensor([0]), torch.tensor([x], dtype=torch.float64))
    assert last.mean(torch.tensor([0])).item() == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_pass_rate": 0.9}, "`min_pass_rate` is 0.9 and `max_pass_rate` 0.8"),
        ({"max_pass_rate": 1.5}, "`max_pass_rate` 1.5"),
        ({"recheck": -0.1}, "`recheck` is -0.1"),
        ({"decay": 2.0}, "`decay` is 2.0"),
        ({"pass_reward": float("nan")}, "`pass_reward` is nan"),
    ],
)
def test_what_is_not_a_curriculum_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Curriculum(**settings)


def test_a_first_step_without_a_measured_sample_is_refused_and_a_later_one_is_not() -> None:
    none = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
    with pytest.raises(UserError, match="no sample of the first step has a reward that counts for `reward/mean`"):
        Curriculum().begun(1).learn(*none)
    measured().learn(*none)
