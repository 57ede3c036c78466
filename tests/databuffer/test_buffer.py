"""Values are stored where they were made, and sent to the ranks that read them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.databuffer.balance import AUTO, Balance
from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError
from rlflow.values.column_kinds import PerSample, PerToken, Scalar
from rlflow.values.layout import Layout
from rlflow.values.ragged import Ragged
from tests.databuffer.all_column_kinds import Everything, everything
from tests.ranks import RankPool

ALONE = Layout((0,), 1)
TWO = Layout((0, 1), 2)
BALANCED = Layout((0, 1), 2, "balanced")


def _space(layout: Layout, shards: list[list[int]], lengths: list[int], balance: Balance = AUTO) -> RowSpace:
    """Rows by id, each a group of its own; `lengths` by id."""
    arrays = [
        torch.tensor(
            [ids, ids, [lengths[i] for i in ids], [lengths[i] for i in ids], [0] * len(ids), [1] * len(ids)],
            dtype=torch.int64,
        )
        for ids in shards
    ]
    return RowSpace.of_shards("rollout", layout, arrays).at(balance=balance)


def test_the_same_layout_gives_the_same_object_and_no_byte_moves() -> None:
    buffer, value = DataBuffer(Transport()), torch.tensor([1.0, 2.0])
    buffer.put("rewards", value, PerSample, _space(ALONE, [[0, 1]], [3, 4]), ALONE)
    assert buffer.get("rewards", Layout((0,), 1)) is value
    assert (buffer.bytes_sent, buffer.bytes_received, buffer.waited_s) == (0, 0, 0.0)


def test_another_layout_of_the_same_rows_gives_the_same_object() -> None:
    buffer, value = DataBuffer(Transport()), torch.tensor([1.0, 2.0])
    buffer.put("rewards", value, PerSample, _space(ALONE, [[0, 1]], [3, 3]), ALONE)
    buffer.issue("rewards", Layout((0,), 1, "balanced"))
    assert buffer.get("rewards", Layout((0,), 1, "balanced")) is value


def _unbalanced_but_off() -> tuple[bool, int]:
    space = _space(TWO, [[0, 1], [2, 3]], [900, 900, 1, 1], balance=Balance("off"))
    buffer, value = DataBuffer(Transport()), torch.zeros(2)
    buffer.put("rewards", value, PerSample, space, TWO)
    buffer.issue("rewards", BALANCED)
    return buffer.get("rewards", BALANCED) is value, buffer.bytes_sent


def test_with_balance_off_equal_shards_exchange_nothing(ranks2: RankPool) -> None:
    assert ranks2.run(_unbalanced_but_off) == [(True, 0)] * 2


def _balanced() -> tuple[list[int], bool, int, int]:
    space = _space(TWO, [[0, 1], [2, 3]], [900, 800, 200, 100])
    buffer, rank = DataBuffer(Transport()), dist.get_rank()
    buffer.put("ids", torch.tensor([[0, 1], [2, 3]][rank]), PerSample, space, TWO)
    buffer.issue("ids", BALANCED)
    found = buffer.get("ids", BALANCED)
    return found.tolist(), buffer.get("ids", BALANCED) is found, buffer.bytes_sent, buffer.bytes_received


def test_readers_of_one_layout_share_one_exchange_and_one_object(ranks2: RankPool) -> None:
    # 900 + 100 and 800 + 200; each rank sends one row of 8 bytes and receives one
    assert ranks2.run(_balanced) == [([0, 3], True, 8, 8), ([1, 2], True, 8, 8)]


def _newcomer() -> tuple[Tensor, Tensor, Ragged, int] | None:
    """Rank 0 makes, rank 1 reads: it learns dtypes and scalars from rank 0, even where there is no row."""
    space, there = _space(ALONE, [[0, 1]], [2, 0]), Layout((1,), 1)
    empty = _space(ALONE, [[]], [])
    buffer, here = DataBuffer(Transport()), dist.get_rank() == 0
    buffer.put("scale", torch.tensor(0.25, dtype=torch.bfloat16) if here else None, Scalar, space, ALONE)
    buffer.put("mask", torch.tensor([[True, True], [False, False]]) if here else None, PerToken, space, ALONE)
    nothing = Ragged(torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
    buffer.put("none", nothing if here else None, Ragged, empty, ALONE)
    for name in ("scale", "mask", "none"):
        buffer.issue(name, there)
    if here:
        for name in ("scale", "mask", "none"):
            buffer.free(name)
        return None
    return buffer.get("scale", there), buffer.get("mask", there), buffer.get("none", there), buffer.bytes_received


def test_a_rank_that_made_nothing_learns_dtypes_and_scalars(ranks2: RankPool) -> None:
    scale, mask, none, received = ranks2.run(_newcomer)[1]
    assert torch.equal(scale, torch.tensor(0.25, dtype=torch.bfloat16))
    assert scale.dtype == torch.bfloat16
    assert mask.tolist() == [[True, True], [False, False]]
    assert none.values.shape == (0, 3)
    assert none.values.dtype == torch.float64
    assert received == 2  # two tokens of one byte


def test_held_bytes_fall_when_a_value_is_freed_and_the_peak_stays() -> None:
    buffer, space = DataBuffer(Transport()), _space(ALONE, [[0, 1]], [3, 3])
    buffer.put("logprobs", torch.zeros(2, 3), PerToken, space, ALONE)  # 24 bytes
    buffer.put("rewards", torch.zeros(2), PerSample, space, ALONE)  # 8 bytes
    buffer.free("logprobs")
    assert (buffer.held_bytes, buffer.peak_held_bytes) == (8, 32)


def test_a_value_put_again_replaces_the_older_one() -> None:
    buffer, space = DataBuffer(Transport()), _space(ALONE, [[0]], [1])
    buffer.put("rewards", torch.tensor([1.0]), PerSample, space, ALONE)
    buffer.put("rewards", torch.tensor([2.0]), PerSample, space, ALONE)
    assert buffer.get("rewards", ALONE).tolist() == [2.0]


def test_a_value_with_a_missing_row_is_refused_by_name() -> None:
    buffer, space = DataBuffer(Transport()), _space(ALONE, [[0, 1]], [1, 1])
    with pytest.raises(UserError, match="`rewards` has 1 rows where 2 were read"):
        buffer.put("rewards", torch.zeros(1), PerSample, space, ALONE)


def test_a_column_with_a_missing_row_is_refused_by_name() -> None:
    buffer, space = DataBuffer(Transport()), _space(ALONE, [[0, 1]], [1, 1])
    with pytest.raises(UserError, match=r"`rollout\.ids` has 1 rows where 2 were read"):
        buffer.put("rollout", everything([0], {0: 1}), Everything, space, ALONE)


def test_a_value_narrower_than_the_longest_response_is_refused() -> None:
    buffer, space = DataBuffer(Transport()), _space(ALONE, [[0, 1]], [1, 3])
    with pytest.raises(UserError, match="`loss` is 2 tokens wide and the longest response has 3"):
        buffer.put("loss", torch.zeros(2, 2), PerToken, space, ALONE)


def test_a_number_where_a_row_tensor_is_annotated_is_refused() -> None:
    buffer, space = DataBuffer(Transport()), _space(ALONE, [[0, 1]], [1, 3])
    with pytest.raises(UserError, match=r"`loss` has shape \[\] and is annotated per sample: return \[B\]"):
        buffer.put("loss", torch.zeros(()), PerSample, space, ALONE)


def test_a_list_where_a_tensor_is_annotated_is_refused() -> None:
    buffer, space = DataBuffer(Transport()), _space(ALONE, [[0, 1]], [1, 3])
    with pytest.raises(UserError, match="`rewards` is a list and is annotated as Tensor"):
        buffer.put("rewards", [0.0, 1.0], PerSample, space, ALONE)


def test_a_tensor_where_a_dataclass_is_annotated_is_refused() -> None:
    buffer, space = DataBuffer(Transport()), _space(ALONE, [[0]], [1])
    with pytest.raises(UserError, match="`rollout` is a Tensor and is annotated as Everything"):
        buffer.put("rollout", torch.zeros(1), Everything, space, ALONE)
