"""Pairs as rows to score."""

from __future__ import annotations

import torch

from rlflow.data.batch import Pairs, Ragged, TokenRows

PAIRS = Pairs(
    prompt_ids=Ragged.from_lists([[1, 2], [3]]),
    chosen_ids=Ragged.from_lists([[4, 0], [5, 6, 0]]),
    rejected_ids=Ragged.from_lists([[7, 8, 9, 0], [0]]),
    rows=[{}, {}],
)


def lists(rows: TokenRows) -> tuple[list[list[int]], list[list[int]], list[int]]:
    return [ids.tolist() for ids in rows.prompt_ids.rows()], rows.response_ids.tolist(), rows.lengths.tolist()


def test_the_sides_of_pairs_are_rows_to_score() -> None:
    assert lists(PAIRS.chosen) == ([[1, 2], [3]], [[4, 0, 0], [5, 6, 0]], [2, 3])
    assert lists(PAIRS.rejected) == ([[1, 2], [3]], [[7, 8, 9, 0], [0, 0, 0, 0]], [4, 1])


def test_both_sides_are_the_chosen_rows_and_then_the_rejected_ones() -> None:
    responses = [[4, 0, 0, 0], [5, 6, 0, 0], [7, 8, 9, 0], [0, 0, 0, 0]]
    assert lists(PAIRS.both) == ([[1, 2], [3], [1, 2], [3]], responses, [2, 3, 4, 1])


def test_the_tokens_of_a_pair_are_those_of_two_rows() -> None:
    assert PAIRS.tokens.tolist() == [(2 + 2) + (2 + 4), (1 + 3) + (1 + 1)]


def test_no_pairs_are_no_rows() -> None:
    nothing = Ragged.from_lists([])
    rows = Pairs(nothing, nothing, nothing, []).both
    assert (len(rows.prompt_ids), tuple(rows.response_ids.shape), rows.lengths.tolist()) == (0, (0, 0), [])
    assert rows.response_ids.dtype == torch.int64
