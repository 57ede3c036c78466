"""The memory of prompts, and the rows that a module chooses by it."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from rlflow.data.loader import ChosenRows
from rlflow.errors import UserError
from rlflow.state.prompt_memory import PromptMemory


def learned(*steps: tuple[list[int], list[float]]) -> PromptMemory:
    memory = PromptMemory()
    for prompts, x in steps:
        memory.learn(torch.tensor(prompts), torch.tensor(x, dtype=torch.float64))
    return memory


def test_several_steps_come_to_the_mean_and_deviation_of_all_numbers() -> None:
    # Of row 3: 1, 0 and 5, mean 2, squared deviations 1 + 4 + 9 = 14, over 2. Of row 7: one number.
    memory = learned(([3, 7, 3], [1.0, 4.0, 0.0]), ([3], [5.0]))
    rows = torch.tensor([3, 7, 0, 99])
    assert memory.count(rows).tolist() == [3, 1, 0, 0]
    assert memory.mean(rows)[:2].tolist() == [2.0, 4.0]
    assert memory.std(rows)[0].item() == pytest.approx(math.sqrt(7), rel=1e-15)
    assert memory.mean(rows)[2:].isnan().all()
    assert memory.std(rows)[1:].isnan().all()


def test_rows_never_seen_get_the_number_given_as_unseen() -> None:
    memory, rows = learned(([3, 7, 3], [1.0, 4.0, 0.0])), torch.tensor([3, 7, 0])
    assert memory.mean(rows, unseen=-1).tolist() == [0.5, 4.0, -1.0]
    assert memory.std(rows, unseen=0)[1:].tolist() == [0.0, 0.0]


def test_a_memory_comes_back_from_json_to_the_bit() -> None:
    memory, again = learned(([3, 7, 3], [0.1, 0.7, 0.3])), PromptMemory()
    again.load_state_dict(json.loads(json.dumps(memory.state_dict())))
    for each in (memory, again):
        each.learn(torch.tensor([3, 0]), torch.tensor([0.2, 1 / 3], dtype=torch.float64))
    assert again.state_dict() == memory.state_dict()


def test_a_number_that_is_nan_is_named_with_its_row() -> None:
    with pytest.raises(UserError, match=r"was given nan of the dataset's row 7 \(from 0\)"):
        learned(([3, 7], [1.0, math.nan]))


def test_a_memory_that_no_module_has_is_not_updated() -> None:
    with pytest.raises(UserError, match="must be an attribute of the module and be updated by a node"):
        PromptMemory().update(torch.tensor([0]), torch.tensor([1.0]))


def in_order(epoch: int) -> Tensor:
    return torch.arange(7) + 10 * epoch


def halves(epoch: int, rows: Tensor) -> Tensor:
    return rows[: 7 - 3 * epoch]


def test_epochs_are_as_long_as_the_rows_that_were_chosen() -> None:
    chosen = ChosenRows(halves, in_order, per_draw=2)
    begun = [None if (epoch := chosen.begin(draw)) is None else epoch.number for draw in range(5)]
    assert begun == [0, None, None, 1, None]  # of 7 rows 3 draws, of 4 rows 2
    assert [chosen.rows(draw).tolist() for draw in (0, 2, 3, 4)] == [[0, 1], [4, 5], [10, 11], [12, 13]]
    assert not chosen.knows(5)


def test_chosen_epochs_come_back_from_json() -> None:
    chosen, again = (ChosenRows(halves, in_order, per_draw=2) for _ in range(2))
    for draw in range(4):
        chosen.begin(draw)
    again.load_state_dict(json.loads(json.dumps(chosen.state_dict())))
    assert again.rows(4).tolist() == [12, 13]
    assert again.begin(4) is None


def test_too_few_rows_and_rows_that_were_not_given_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"left 1 of 7 prompts for epoch 1, and a step takes 2 \(`data.prompts_per_step`"
    ):
        ChosenRows(lambda epoch, rows: rows[:1], in_order, per_draw=2).begin(0)
    with pytest.raises(UserError, match="returned row 7, which it was not given; return rows"):
        ChosenRows(lambda epoch, rows: rows + 3, in_order, per_draw=2).begin(0)
    with pytest.raises(UserError, match=r"return rows that it was given, `\[N\]` int64"):
        ChosenRows(lambda epoch, rows: rows > 3, in_order, per_draw=2).begin(0)
