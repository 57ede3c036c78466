"""The rows that the docstrings of `Rollout`, `RowPath` and `Each` show."""

from __future__ import annotations

import torch

from rlflow import Rollout
from rlflow.types import Each
from rlflow.values.path import RowPath
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Ending


def rows(*lists: list[int]) -> torch.Tensor:
    """Right-padded with zeros."""
    widest = max(map(len, lists))
    return torch.tensor([[*each, *[0] * (widest - len(each))] for each in lists])


def shown() -> Rollout:
    lengths = torch.tensor([3, 2, 7, 7])
    return Rollout(
        prompt_ids=Ragged.from_lists([[10, 11], [10, 11], [12, 13, 14], [12, 13, 14]]),
        response_ids=rows([20, 21, 2], [22, 2], [*range(23, 30)], [30, 31, 40, 41, 42, 32, 2]),
        loss_mask=rows([1] * 3, [1] * 2, [1] * 7, [1, 1, 0, 0, 0, 1, 1]).bool(),
        lengths=lengths,
        logprobs=rows([-1, -2, -3], [-1, -4], [*range(-1, -8, -1)], [-1, -2, 0, 0, 0, -3, -4]) / 10,
        finished=torch.tensor([True, True, False, True]),
        path=RowPath(torch.tensor([[4, 0], [4, 1], [7, 0], [7, 1]]), ("batch", "rollout")),
        version=torch.full((4,), 3),
        versions=rows([3] * 3, [3] * 2, [3] * 7, [3] * 7).int(),
        segments=Ragged.from_lists([[3], [2], [7], [2, 3, 2]]),
        turn_rewards=Ragged(torch.tensor([1.0, 0.0, 0.0, 0.5, 1.0]), torch.tensor([1, 1, 1, 2])),
        ended=torch.tensor([Ending.DONE, Ending.DONE, Ending.TOKENS, Ending.DONE]),
        texts=["5", "no", "let me see, I", "it is 5"],
        rows=[{"question": "2+3="}] * 2 + [{"question": "4+4+1="}] * 2,
    )


def test_columns_that_nobody_made_are_empty() -> None:
    rollout = shown()
    assert rollout.inherited.tolist() == rollout.seat.tolist() == rollout.experts.lengths.tolist() == [0] * 4
    assert rollout.experts.values.dtype == torch.uint8
    assert rollout.messages == [[]] * 4
    assert rollout.progress == [{}] * 4


def test_what_follows_from_the_shown_rollout_is_what_its_docstring_says() -> None:
    rollout = shown()
    assert rollout.group.tolist() == [4, 4, 7, 7]
    assert rollout.index.tolist() == [0, 1, 0, 1]
    assert rollout.turns.tolist() == [1, 1, 1, 2]
    assert rollout.policy_lengths.tolist() == [3, 2, 7, 4]
    assert rollout.turn[3].tolist() == [0, 0, -1, -1, -1, 1, 1]


def test_the_shown_paths_are_in_the_groups_that_the_docstring_says() -> None:
    levels = ("batch", "question", "answer")
    questions = RowPath(torch.tensor([[4, 0], [4, 1], [7, 0], [7, 1]]), levels[:2])
    answers = RowPath(torch.tensor([[4, 0, 0], [4, 0, 1]]), levels)
    assert questions.group.tolist() == [4, 4, 7, 7]
    assert answers.group_of("batch").tolist() == [4, 4]


def test_the_shown_rewards_of_rows_below_are_reduced_as_the_docstring_says() -> None:
    below = Each(torch.tensor([0.5, 1.0, 0.0, 1.0, 1.0]), torch.tensor([2, 0, 3]))
    assert below.parent.tolist() == [0, 0, 2, 2, 2]
    assert below.mean().tolist() == [0.75, 0.0, torch.tensor(2 / 3).item()]
    assert below.argmax().tolist() == [1, -1, 3]
