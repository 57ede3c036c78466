"""Even shares of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlflow.databuffer.balance import Balance, Costs, Predicted, deal, even_parts, group_partition, grouped
from rlflow.errors import UserError

LENGTHS = (100, 900, 300, 700, 500, 200, 800, 400)


def alone(costs: Tensor) -> Costs:
    """Costs of rows that share nothing."""
    return Costs(costs, torch.zeros_like(costs), torch.arange(len(costs)))


def sums_of(costs: Costs, shares: tuple[Tensor, ...]) -> list[int]:
    """By hand: what each share's rows cost, and its groups."""
    return [
        int(costs.own[rows].sum()) + sum(int(costs.shared[group]) for group in set(costs.group[rows].tolist()))
        for rows in shares
    ]


@pytest.mark.parametrize(("shards", "sums"), [(2, [2000, 1900]), (4, [1000, 1000, 1000, 900])])
def test_balance_gives_the_known_answers(shards: int, sums: list[int]) -> None:
    costs = alone(torch.tensor(LENGTHS))
    assert sorted(sums_of(costs, grouped(deal(costs, shards), shards)), reverse=True) == sums


ROWS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5000)), max_size=60)  # group and own cost


@given(rows=ROWS, shared=st.lists(st.integers(0, 9000), min_size=7, max_size=7), shards=st.integers(1, 9))
def test_every_row_has_one_shard_and_sums_differ_by_at_most_one_row_alone(
    rows: list[tuple[int, int]], shared: list[int], shards: int
) -> None:
    group, own = (torch.tensor([row[place] for row in rows], dtype=torch.int64) for place in range(2))
    costs = Costs(own, torch.tensor(shared), group)
    shard = deal(costs, shards)
    shares = grouped(shard, shards)
    assert sorted(torch.cat(shares).tolist()) == list(range(len(rows)))
    sums = sums_of(costs, shares)
    assert costs.sums(shard, shards).tolist() == sums
    assert max(sums) - min(sums) <= max((shared[of] + cost for of, cost in rows), default=0)


def test_groups_stay_whole_where_that_is_even() -> None:
    # Prompts of 100, four groups of 4 responses of 10 and two of 20: 140 four times, 180 twice.
    costs = Costs(torch.tensor([10] * 16 + [20] * 8), torch.full((6,), 100), torch.arange(24) // 4)
    shares = grouped(deal(costs, 2), 2)
    assert sorted(sums_of(costs, shares)) == [460, 460]  # 180 + 140 + 140
    assert all(len(set(costs.group[rows].tolist())) == 3 for rows in shares)


def test_a_group_is_cut_where_a_shard_would_wait() -> None:
    # One group: 100 and 8 responses of 50. In two parts 100 + 200 each; one shard alone would take 500.
    costs = Costs(torch.tensor([50] * 8), torch.tensor([100]), torch.zeros(8, dtype=torch.int64))
    assert sums_of(costs, grouped(deal(costs, 2), 2)) == [300, 300]
    # Of two groups of 2,000 + 8 x 50 a third shard takes the half of one, 200 less than the whole of it.
    costs = Costs(torch.tensor([50] * 16), torch.tensor([2000, 2000]), torch.arange(16) // 8)
    assert sorted(sums_of(costs, grouped(deal(costs, 3), 3))) == [2200, 2200, 2400]


def test_the_rows_of_a_group_have_their_shortest_prompt_in_common() -> None:
    tokens, lengths = torch.tensor([30, 25, 40, 9]), torch.tensor([10, 6, 20, 4])  # prompts of 20, 19, 20 and 5
    costs = Balance().costs(tokens, lengths, torch.tensor([7, 7, 7, 3]))
    assert costs.own[:3].tolist() == [11, 6, 21]
    assert costs.sums(torch.tensor([0, 0, 1, 1]), 2).tolist() == [19 + 11 + 6, 19 + 21 + 9]


def test_long_prompts_on_many_shards_are_read_about_once() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, 151, (32 * 8,), generator=generator)
    prompts = torch.randint(800, 1201, (32,), generator=generator).repeat_interleave(8)
    costs = Balance().costs(prompts + lengths, lengths, torch.arange(256) // 8)
    whole = int((prompts + lengths).sum()) / 16  # a shard's even part where each row is read whole
    assert int(costs.sums(deal(costs, 16), 16).max()) < 0.27 * whole


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


def test_a_group_that_is_cut_costs_its_prompt_twice() -> None:
    tokens, lengths, update = torch.tensor([110, 110, 20, 20]), torch.full((4,), 10), torch.zeros(4, dtype=torch.int64)
    here, there, stay = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), torch.tensor([False, False])
    balance = Balance(tokens_per_s=1, bytes_per_token=1, bytes_per_s=1000)
    costs = balance.costs(tokens, lengths, torch.tensor([5, 5, 6, 6]))
    # prompts of 100 and 10: 120 | 30 at home, and 110 + 20 = 130 on both there, for 110 tokens that arrive
    assert balance.predict(tokens, costs, update, here, there, stay) == Predicted(-10.0, 0.11)


def test_moving_pays_where_the_slowest_shard_saves_more_than_the_bytes_take() -> None:
    tokens, update = torch.tensor([300, 300, 100, 100]), torch.zeros(4, dtype=torch.int64)
    here, there, stay = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), torch.tensor([False, False])
    # 600 -> 400 tokens saves 2 s at 100 tokens/s; 300 tokens of 10 bytes arrive at the second shard
    fast, slow = (Balance(tokens_per_s=100, bytes_per_token=10, bytes_per_s=speed) for speed in (1501.0, 1499.0))
    assert fast.predict(tokens, alone(tokens), update, here, there, stay) == Predicted(2.0, 3000 / 1501)
    assert fast.predict(tokens, alone(tokens), update, here, there, stay).pays
    assert not slow.predict(tokens, alone(tokens), update, here, there, stay).pays


def test_shards_even_in_all_but_not_in_each_mini_batch_are_worth_moving() -> None:
    tokens, update = torch.tensor([9, 1, 1, 9]), torch.tensor([0, 0, 1, 1])
    here, there, stay = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1]), torch.tensor([False, False])
    balance = Balance()
    assert not balance.predict(
        tokens, alone(tokens), update, here, there, stay
    ).pays  # both: 9 + 9 at home, 10 + 10 there
    assert balance.predict(tokens, alone(tokens), update, there, here, stay).pays


def test_rows_that_travel_anyway_are_balanced_for_nothing() -> None:
    tokens, update = torch.tensor([300, 300, 100, 100]), torch.zeros(4, dtype=torch.int64)
    here, there, travels = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), torch.tensor([True, True])
    slow = Balance(tokens_per_s=100, bytes_per_token=10, bytes_per_s=1)
    # without balancing 600 tokens arrive at the busier shard, with it 400
    assert slow.predict(tokens, alone(tokens), update, here, there, travels) == Predicted(2.0, 0.0)


def test_a_long_row_costs_more_than_short_rows_of_as_many_tokens() -> None:
    # 100 + 0.01 * 100^2 = 200 and 10 + 0.01 * 10^2 = 11
    lengths = torch.tensor([100, 10, 0])
    assert Balance(quadratic=0.01).costs(lengths, lengths, torch.arange(3)).own.tolist() == [200, 11, 0]
    tokens, update = torch.tensor([100, 20, 60, 60]), torch.zeros(4, dtype=torch.int64)
    here, there, stay = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 0]), torch.tensor([False, False])
    balance = Balance(tokens_per_s=1, bytes_per_token=1, bytes_per_s=1, quadratic=0.01)
    # costs 200, 24, 96, 96: at home 224 and 192; after 296 and 120, so 72 s are lost, for 60 tokens that arrive
    costs = balance.costs(tokens, tokens, torch.arange(4))
    assert balance.predict(tokens, costs, update, here, there, stay) == Predicted(-72.0, 60.0)


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
