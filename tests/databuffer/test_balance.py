"""Even shares of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlflow.databuffer.balance import Balance, Predicted, deal, even_parts, group_partition, grouped
from rlflow.errors import UserError

KNOWN = json.loads((Path(__file__).parents[1] / "known_answers.json").read_text())["balance"]


def _sums(costs: Tensor, shares: tuple[Tensor, ...]) -> list[int]:
    return sorted((int(costs[rows].sum()) for rows in shares), reverse=True)


@pytest.mark.parametrize(("shards", "sums"), [(2, [2000, 1900]), (4, [1000, 1000, 1000, 900])])
def test_balance_gives_the_known_answers(shards: int, sums: list[int]) -> None:
    costs = torch.tensor(KNOWN["lengths"])
    shares = grouped(deal(costs, shards), shards)
    assert _sums(costs, shares) == sums
    assert {len(rows) for rows in shares} == {8 // shards}


@given(costs=st.lists(st.integers(0, 5000), max_size=80), shards=st.integers(1, 9))
def test_every_row_has_one_shard_counts_differ_by_one_and_sums_by_at_most_one_row(
    costs: list[int], shards: int
) -> None:
    cost = torch.tensor(costs, dtype=torch.int64)
    shares = grouped(deal(cost, shards), shards)
    assert sorted(torch.cat(shares).tolist()) == list(range(len(costs)))
    counts, sums = [len(rows) for rows in shares], _sums(cost, shares)
    assert max(counts) - min(counts) <= 1
    assert sums[0] - sums[-1] <= max(costs, default=0)


def test_a_shard_with_a_dear_row_gets_cheap_ones_until_the_others_have_caught_up() -> None:
    costs = torch.tensor([100, 40, 40, 40, 5, 5, 5, 5])
    # 100 | 40, then 5 | 40 since 40 + 40 < 100, then 5 | 40 as 80 is poorer than 105, then 5 | 5: 115 | 125
    assert _sums(costs, grouped(deal(costs, 2), 2)) == [125, 115]


def test_groups_are_dealt_whole_and_in_order() -> None:
    # five groups of two over two shards by their middle rows 1, 3 | 5, 7, 9 of ten
    groups = torch.tensor([7, 7, 3, 3, 9, 9, 1, 1, 5, 5])
    first, second = group_partition(groups, 2)
    assert groups[first].tolist() == [1, 1, 3, 3]
    assert groups[second].tolist() == [5, 5, 7, 7, 9, 9]
    assert first.tolist() == [6, 7, 2, 3]


def test_groups_of_uneven_sizes_are_dealt_by_rows() -> None:
    # one group of six and three of two: twelve rows, middles at 3 | 7, 9, 11
    groups = torch.tensor([0] * 6 + [1, 1, 2, 2, 3, 3])
    assert [len(rows) for rows in group_partition(groups, 2)] == [6, 6]


def test_there_may_be_fewer_groups_than_shards() -> None:
    shares = group_partition(torch.tensor([0, 0]), 4)
    assert sorted(len(rows) for rows in shares) == [0, 0, 0, 2]


def test_moving_pays_where_the_slowest_shard_saves_more_than_the_bytes_take() -> None:
    tokens, update = torch.tensor([300, 300, 100, 100]), torch.zeros(4, dtype=torch.int64)
    here, there, stay = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), torch.tensor([False, False])
    # 600 -> 400 tokens saves 2 s at 100 tokens/s; 300 tokens of 10 bytes arrive at the second shard
    fast, slow = (Balance(tokens_per_s=100, bytes_per_token=10, bytes_per_s=speed) for speed in (1501.0, 1499.0))
    assert fast.predict(tokens, update, here, there, stay) == Predicted(2.0, 3000 / 1501)
    assert fast.predict(tokens, update, here, there, stay).pays
    assert not slow.predict(tokens, update, here, there, stay).pays


def test_shards_even_in_all_but_not_in_each_mini_batch_are_worth_moving() -> None:
    tokens, update = torch.tensor([9, 1, 1, 9]), torch.tensor([0, 0, 1, 1])
    here, there, stay = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1]), torch.tensor([False, False])
    balance = Balance()
    assert not balance.predict(tokens, update, here, there, stay).pays  # both: 9 + 9 at home, 10 + 10 there
    assert balance.predict(tokens, update, there, here, stay).pays


def test_rows_that_travel_anyway_are_balanced_for_nothing() -> None:
    tokens, update = torch.tensor([300, 300, 100, 100]), torch.zeros(4, dtype=torch.int64)
    here, there, travels = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), torch.tensor([True, True])
    slow = Balance(tokens_per_s=100, bytes_per_token=10, bytes_per_s=1)
    # without balancing 600 tokens arrive at the busier shard, with it 400
    assert slow.predict(tokens, update, here, there, travels) == Predicted(2.0, 0.0)


def test_a_long_row_costs_more_than_short_rows_of_as_many_tokens() -> None:
    # 100 + 0.01 * 100^2 = 200 and 10 + 0.01 * 10^2 = 11
    assert Balance(quadratic=0.01).costs(torch.tensor([100, 10, 0])).tolist() == [200, 11, 0]
    tokens, update = torch.tensor([100, 20, 60, 60]), torch.zeros(4, dtype=torch.int64)
    here, there, stay = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 0]), torch.tensor([False, False])
    balance = Balance(tokens_per_s=1, bytes_per_token=1, bytes_per_s=1, quadratic=0.01)
    # costs 200, 24, 96, 96: at home 224 and 192; after 296 and 120, so 72 s are lost, for 60 tokens that arrive
    assert balance.predict(tokens, update, here, there, stay) == Predicted(-72.0, 60.0)


@pytest.mark.parametrize(
    ("constants", "text"),
    [
        ({"tokens_per_s": 0.0}, "`trainer.balance.tokens_per_s` is 0; give more than 0"),
        ({"quadratic": -1.0}, "`trainer.balance.quadratic` is -1; give 0 or more"),
    ],
)
def test_constants_that_cannot_be_are_refused(constants: dict[str, float], text: str) -> None:
    with pytest.raises(UserError, match=text):
        Balance(**constants)  # type: ignore[arg-type]


def test_parts_inside_a_rank_are_even_whatever_their_counts() -> None:
    # the dear row alone, and as much in ten cheap ones; dealt by counts 10 + 5 x 1 would stand against 5 x 1
    assert even_parts([10] + [1] * 10, 2) == [[0], list(range(1, 11))]
