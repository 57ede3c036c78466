from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlflow.errors import UserError
from rlflow.models import packing
from rlflow.models.packing import pack, packed_micro_batches, pad, padded_micro_batches, take, token_counts
from rlflow.values.batch import TokenRows
from rlflow.values.column_kinds import ColumnKind
from rlflow.values.columns import Column
from rlflow.values.ragged import Ragged

# Row 0: prompt 7, response 1 2. Row 1: prompt 8 8, no response. Row 2: prompt 9 10, response 3.
ROWS = TokenRows(
    prompt_ids=Ragged.from_lists([[7], [8, 8], [9, 10]]),
    response_ids=torch.tensor([[1, 2, 99], [99, 99, 99], [3, 99, 99]]),
    lengths=torch.tensor([2, 0, 1]),
)
NO_ROWS = take(ROWS, torch.tensor([], dtype=torch.int64))


def lists(*tensors: Tensor) -> list[list[int]]:
    return [tensor.tolist() for tensor in tensors]


def test_packed_rows_follow_one_another_without_their_last_tokens() -> None:
    packed = pack(ROWS)
    # Row 0 reads 7 1 (to score 1 2), row 1 nothing, row 2 reads 9 10 (to score 3).
    assert packed.input_ids.tolist() == [[7, 1, 9, 10]]
    assert packed.position_ids.tolist() == [[0, 1, 0, 1]]
    assert packed.cu_seqlens is not None
    assert packed.cu_seqlens.tolist() == [0, 2, 4]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == 2


def test_a_position_scores_the_token_after_it() -> None:
    packed = pack(ROWS)
    # The logits at 7 score 1, at 1 score 2, at 10 score 3.
    assert packed.scored.tolist() == [0, 1, 3]
    assert packed.targets.tolist() == [1, 2, 3]


def test_columns_that_a_model_reads_are_packed_and_taken_with_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for column in (
        Column("patches", ColumnKind.RAGGED, model_input="any"),
        Column("weights", ColumnKind.TOKEN, model_input="any"),
    ):
        monkeypatch.setitem(packing.MODEL_INPUTS, column.name, column)
    columns = {
        "experts": Ragged(torch.tensor([[70], [71], [90], [91]]), torch.tensor([2, 0, 2])),  # of 7 1, and 9 10
        "patches": Ragged.from_lists([[4, 5, 6], [7], []]),
        "weights": torch.tensor([[0.1, 0.2, 0.0], [0.0, 0.0, 0.0], [0.3, 0.0, 0.0]]),
    }
    rows = replace(ROWS, columns=columns)
    packed = pack(rows).columns
    assert packed["experts"].tolist() == [[70], [71], [90], [91]]
    assert packed["patches"].tolist() == [4, 5, 6]  # row 1 has no response, and is not read
    assert packed["weights"].tolist() == pytest.approx([0.1, 0.2, 0.3])
    last = pack(take(rows, torch.tensor([2]))).columns
    assert last["experts"].tolist() == [[90], [91]]
    assert last["weights"].tolist() == pytest.approx([0.3])
    assert pack(take(rows, torch.tensor([1]))).columns == {}


def test_a_line_is_divided_into_parts_of_one_length_that_score_their_own_tokens() -> None:
    # 7 1 9 10 among three ranks: two tokens each, the last two of them a sequence of padding.
    parts = pack(ROWS).divide(3)
    assert [part.input_ids.tolist() for part in parts] == [[[7, 1]], [[9, 10]], [[0, 0]]]
    assert [part.position_ids.tolist() for part in parts] == [[[0, 1]], [[0, 1]], [[0, 1]]]
    assert [part.scored.tolist() for part in parts] == [[0, 1], [1], []]
    assert [part.targets.tolist() for part in parts] == [[1, 2], [3], []]
    assert [part.useful_tokens for part in parts] == [2, 2, 0]
    for part in parts:  # attention sees the whole line
        assert part.cu_seqlens is not None
        assert part.cu_seqlens.tolist() == [0, 2, 4, 6]
        assert part.cu_seqlens.dtype == torch.int32
        assert part.max_seqlen == 2


def test_padding_longer_than_every_sequence_is_the_longest() -> None:
    assert [part.max_seqlen for part in pack(NO_ROWS).divide(4)] == [3, 3, 3, 3]  # one token and three of padding


def test_padded_rows_score_the_same_tokens_from_a_line_each() -> None:
    rows = TokenRows(Ragged.from_lists([[9], [7, 6]]), torch.tensor([[3, 0], [1, 2]]), torch.tensor([1, 2]))
    padded = pad(rows)
    assert padded.input_ids.tolist() == [[9, 0, 0], [7, 6, 1]]
    assert padded.position_ids.tolist() == [[0, 0, 0], [0, 1, 2]]
    assert padded.cu_seqlens is None
    # Counted through both lines: 9 stands at 0, 6 at 4, 1 at 5.
    assert padded.scored.tolist() == [0, 4, 5]
    assert padded.targets.tolist() == [3, 1, 2]


def test_values_return_to_their_rows_with_zeros_around() -> None:
    assert (
        pack(ROWS).unpack(torch.tensor([0.1, 0.2, 0.3])).tolist()
        == torch.tensor([[0.1, 0.2, 0.0], [0.0, 0.0, 0.0], [0.3, 0.0, 0.0]]).tolist()
    )


def test_gradients_return_by_the_same_way() -> None:
    values = torch.zeros(3, requires_grad=True)
    weights = torch.arange(9.0).view(3, 3)
    (pack(ROWS).unpack(values) * weights).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 1.0, 6.0]


def test_useful_tokens_are_those_that_something_is_scored_from() -> None:
    assert token_counts(ROWS).tolist() == [2, 0, 2]
    assert pack(ROWS).useful_tokens == 4
    assert pad(ROWS).useful_tokens == 4


@pytest.mark.parametrize("form", [pack, pad])
def test_without_rows_one_dummy_token_is_read_and_none_scored(form: object) -> None:
    empty = form(NO_ROWS)  # type: ignore[operator]
    assert empty.input_ids.tolist() == [[0]]
    assert empty.position_ids.tolist() == [[0]]
    assert empty.scored.numel() == 0
    assert empty.useful_tokens == 0
    values = torch.zeros(0, requires_grad=True)
    assert empty.unpack(values).shape == (0, 3)
    assert empty.unpack(values).requires_grad


def test_an_empty_prompt_is_refused() -> None:
    rows = TokenRows(Ragged.from_lists([[5], []]), torch.tensor([[1], [2]]), torch.tensor([1, 1]))
    with pytest.raises(UserError, match="row 1 has an empty prompt"):
        pack(rows)


def test_rows_are_taken_in_the_order_asked_for() -> None:
    taken = take(ROWS, torch.tensor([2, 0]))
    assert lists(*taken.prompt_ids.rows()) == [[9, 10], [7]]
    assert taken.lengths.tolist() == [1, 2]


def test_micro_batches_are_even_in_tokens() -> None:
    # 3,900 tokens, the longest first to the emptier one: 900 500 400 200 against 800 700 300 100.
    counts = torch.tensor([100, 900, 300, 700, 500, 200, 800, 400])
    parts = packed_micro_batches(counts, budget=2000)
    assert sorted(int(counts[part].sum()) for part in parts) == [1900, 2000]


def test_a_row_above_the_budget_stands_alone() -> None:
    assert lists(*packed_micro_batches(torch.tensor([3, 50, 4]), budget=10)) == [[1], [0, 2]]


def test_more_micro_batches_can_be_asked_for_than_there_are_rows() -> None:
    for split in (packed_micro_batches, padded_micro_batches):
        parts = split(torch.tensor([3, 4]), 100, at_least=4)
        assert sorted(lists(*parts)) in ([[], [], [0], [1]], [[], [], [], [0, 1]])


def test_without_rows_there_is_one_empty_micro_batch() -> None:
    for split in (packed_micro_batches, padded_micro_batches):
        assert lists(*split(torch.tensor([], dtype=torch.int64), 100)) == [[]]


COUNTS = st.lists(st.integers(0, 40), max_size=30)


@settings(deadline=None)
@given(counts=COUNTS, budget=st.integers(1, 100), at_least=st.integers(1, 8))
def test_micro_batches_hold_each_row_once_and_keep_the_budget(counts: list[int], budget: int, at_least: int) -> None:
    for split in (packed_micro_batches, padded_micro_batches):
        parts = split(torch.tensor(counts, dtype=torch.int64), budget, at_least)
        assert len(parts) >= at_least
        assert sorted(row for part in parts for row in part.tolist()) == list(range(len(counts)))
        for part in parts:
            sizes = [counts[row] for row in part.tolist()]
            room = sum(sizes) if split is packed_micro_batches else len(sizes) * max(sizes, default=0)
            assert room <= budget or len(sizes) == 1 or max(sizes) == 0


@settings(deadline=None)
@given(counts=COUNTS, budget=st.integers(1, 100))
def test_asking_for_as_many_micro_batches_as_are_made_changes_nothing(counts: list[int], budget: int) -> None:
    for split in (packed_micro_batches, padded_micro_batches):
        tokens = torch.tensor(counts, dtype=torch.int64)
        parts = split(tokens, budget)
        assert lists(*split(tokens, budget, len(parts))) == lists(*parts)
