"""Paths of rows: groups at every level, and children numbered in their order; worked out by hand."""

from __future__ import annotations

import pytest
import torch

from rlflow.errors import UserError
from rlflow.values.path import RowPath, lexicographic

LEVELS = ("batch", "question", "answer")
# prompt 7 has two questions of two answers and one; prompt 4 one question of two answers
ANSWERS = RowPath(torch.tensor([[7, 0, 0], [7, 0, 1], [7, 1, 0], [4, 0, 0], [4, 0, 1]]), LEVELS)


def test_siblings_are_a_group_and_so_are_all_rows_below_one_of_a_level() -> None:
    assert _alike(ANSWERS.group) == [[0, 1], [2], [3, 4]]
    assert _alike(ANSWERS.group_of("question")) == [[0, 1], [2], [3, 4]]
    assert ANSWERS.group_of("batch").tolist() == [7, 7, 7, 4, 4]
    assert _alike(ANSWERS.group_of("answer")) == [[0], [1], [2], [3], [4]]
    assert ANSWERS.index.tolist() == [0, 1, 0, 0, 1]
    assert ANSWERS.root.tolist() == [7, 7, 7, 4, 4]


def test_groups_of_rows_are_the_same_numbers_on_every_rank() -> None:
    here, there = ANSWERS.take(torch.tensor([0, 1])), ANSWERS.take(torch.tensor([2, 3, 4]))
    assert torch.cat([here.group, there.group]).tolist() == ANSWERS.group.tolist()
    assert bool((ANSWERS.group < 0).all()), "no prompt's id"


def test_groups_that_have_no_number_are_not_given_one() -> None:
    # of two numbers a child has 63 // 3 = 21 bits, and a prompt's id 42
    most = RowPath(torch.tensor([[(1 << 42) - 1, (1 << 21) - 1, 0], [0, 0, 0]]), LEVELS)
    assert most.group.tolist() == [-(1 << 63), -1]
    for numbers in ([[0, 1 << 21, 0]], [[1 << 42, 0, 0]]):
        with pytest.raises(AssertionError):
            _ = RowPath(torch.tensor(numbers), LEVELS).group


def test_the_group_of_samples_of_prompts_is_the_prompts_id() -> None:
    samples = RowPath.of_groups(torch.tensor([9, 9, 2]))
    assert samples.numbers.tolist() == [[9, 0], [9, 1], [2, 0]]
    assert samples.group.tolist() == [9, 9, 2]
    assert RowPath(torch.tensor([[3], [5]]), ("batch",)).group.tolist() == [3, 5]


def test_a_level_that_does_not_exist_is_refused() -> None:
    line = "rows of `answer` have no level 'questoin'; theirs are batch, question, answer. Did you mean \"question\"?"
    with pytest.raises(UserError) as refused:
        ANSWERS.group_of("questoin")
    assert str(refused.value) == line


def test_children_are_consecutive_and_numbered_from_0() -> None:
    questions = RowPath(torch.tensor([[7, 0], [7, 1], [4, 0]]), LEVELS[:2])
    made = questions.children(torch.tensor([2, 1, 2]), "answer")
    assert (made.numbers.tolist(), made.levels) == (ANSWERS.numbers.tolist(), LEVELS)


def test_rows_that_a_node_returns_are_renumbered_below_their_ancestors() -> None:
    kept = ANSWERS.take(torch.tensor([1, 4, 2]))
    found = kept.below(1, "best")
    assert found.numbers.tolist() == [[7, 0], [4, 0], [7, 1]]
    assert found.levels == ("batch", "best")
    assert kept.followed_by(kept).below(2, "both").numbers.tolist() == [
        [7, 0, 0],
        [4, 0, 0],
        [7, 1, 0],
        [7, 0, 1],
        [4, 0, 1],
        [7, 1, 1],
    ]


def test_rows_stand_in_the_order_of_their_first_numbers_then_their_second() -> None:
    assert lexicographic(ANSWERS.numbers).tolist() == [3, 4, 0, 1, 2]


def _alike(group: torch.Tensor) -> list[list[int]]:
    """The rows of each group, by their first."""
    rows: dict[int, list[int]] = {}
    for row, of in enumerate(group.tolist()):
        rows.setdefault(of, []).append(row)
    return list(rows.values())
