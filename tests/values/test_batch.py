"""Values as rows: pairs to score, and rows joined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from rlflow.values.batch import Pairs, TokenRows
from rlflow.values.column_kinds import ColumnKind, PerSample, PerToken, Texts
from rlflow.values.columns import join_rows, trim
from rlflow.values.not_sent import NotSent
from rlflow.values.ragged import Ragged

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


def test_without_pairs_there_are_no_rows() -> None:
    nothing = Ragged.from_lists([])
    rows = Pairs(nothing, nothing, nothing, []).both
    assert (len(rows.prompt_ids), tuple(rows.response_ids.shape), rows.lengths.tolist()) == (0, (0, 0), [])
    assert rows.response_ids.dtype == torch.int64


def test_joined_rows_are_as_wide_as_the_widest() -> None:
    joined = join_rows([torch.tensor([[1]]), torch.zeros(0, 0, dtype=torch.int64), torch.tensor([[2, 3]])], PerToken)
    assert joined.tolist() == [[1, 0], [2, 3]]


def test_a_part_without_rows_decides_neither_dtype_nor_shape() -> None:
    joined = join_rows([torch.tensor([]), torch.tensor([[1, 2]])], PerSample)
    assert joined.dtype == torch.int64
    assert joined.tolist() == [[1, 2]]
    assert join_rows([torch.zeros(0, 3), torch.zeros(0, 3)], PerSample).shape == (0, 3)


def test_a_column_not_sent_in_one_part_is_not_sent_in_the_joined_rows() -> None:
    @dataclass(frozen=True)
    class ParsedTurn:
        texts: Annotated[list[str], ColumnKind.JSON]

    assert join_rows([["a"], ["b", "c"]], Texts) == ["a", "b", "c"]
    joined = join_rows([ParsedTurn(["a"]), ParsedTurn(NotSent("texts"))], ParsedTurn)  # type: ignore[arg-type]
    assert isinstance(joined.texts, NotSent)


def test_trimming_cuts_columns_of_tokens_only() -> None:
    rows = torch.tensor([[1, 2, 0]])
    assert trim(rows, PerToken, 2).tolist() == [[1, 2]]
    assert trim(rows, PerSample, 2) is rows
