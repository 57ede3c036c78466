"""Row spaces: paths, partitions, and mini-batches."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rlflow.databuffer.balance import AUTO, Balance, Predicted
from rlflow.databuffer.rows import NUMBERS, RowSpace, space_from_message, space_to_message
from rlflow.databuffer.transport import Transport
from rlflow.values.layout import Layout
from tests.ranks import RankPool

HOME = Layout((0, 1), 2)


def _space(tokens: list[int], group_size: int = 1, step: int = 0, balance: Balance = AUTO) -> RowSpace:
    """Rows 0, 1, ... of these tokens, made in two halves."""
    ids = torch.arange(len(tokens))
    rows = torch.stack([ids // group_size, ids, torch.tensor(tokens), torch.tensor(tokens), ids * 0, ids * 0 + 1])
    half = len(tokens) // 2
    return RowSpace.of_shards("rollout", HOME, [rows[:, :half], rows[:, half:]]).at(seed=1, step=step, balance=balance)


def _gathered() -> tuple[dict[str, list[int]], list[list[int]]]:
    """Two shards of two peers each: the second peers tell nonsense, which must not count."""
    rank, layout = dist.get_rank(), Layout((0, 1, 2, 3), 2)
    ids = {0: [40, 10, 20], 1: [99], 2: [30], 3: []}[rank]
    at = torch.tensor(ids, dtype=torch.int64)
    path = torch.stack([at // 20, at], dim=1)
    space = RowSpace.gather("rollout", Transport(), layout, path=path, lengths=at + 1, tokens=at + 2)
    arrays = {name: getattr(space, name).tolist() for name in ("path", "lengths", "tokens", "versions")}
    return arrays, [rows.tolist() for rows in space.partition(layout).shards]


def test_every_rank_knows_all_rows_by_path_and_each_row_once(ranks4: RankPool) -> None:
    arrays, shards = ranks4.run(_gathered)[0]
    assert arrays == {
        "path": [[0, 10], [1, 20], [1, 30], [2, 40]],
        "lengths": [11, 21, 31, 41],
        "tokens": [12, 22, 32, 42],
        "versions": [-1] * 4,
    }
    assert shards == [[3, 0, 1], [2]]
    assert ranks4.run(_gathered) == [(arrays, shards)] * 4


def test_one_process_needs_no_process_group() -> None:
    ids = torch.tensor([2, 1])
    alone = Layout((0,), 1)
    space = RowSpace.gather("batch", Transport(), alone, path=ids[:, None], lengths=ids, tokens=ids)
    assert space.held(alone, 0).tolist() == [1, 0]


def test_rows_of_whole_groups_stay_where_they_were_made_for_as_many_shards() -> None:
    space = _space([1] * 8, group_size=2)
    assert space.partition(Layout((4, 5, 6, 7), 2)) is space.partition(HOME)


def test_the_ranks_of_an_engine_share_out_its_own_groups() -> None:
    ids = torch.arange(8)
    rows = torch.stack([ids] * 6)  # groups of one; 2, 5 and 1 of them made by engines of two ranks
    engines = Layout((0, 1, 2, 3, 4, 5), 3)
    space = RowSpace.of_shards("rollout", engines, [rows[:, :2], rows[:, 2:7], rows[:, 7:]])
    shards = [held.tolist() for held in space.partition(Layout(engines.ranks, 6)).shards]
    assert [sorted(shards[i] + shards[i + 1]) for i in (0, 2, 4)] == [[0, 1], [2, 3, 4, 5, 6], [7]]
    assert [len(held) for held in shards[:4]] == [1, 1, 2, 3]


def test_groups_are_dealt_again_for_another_number_of_shards() -> None:
    space = _space([1] * 8, group_size=2)
    shards = space.partition(Layout((0, 1, 2, 3), 4)).shards
    assert [rows.tolist() for rows in shards] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_balanced_rows_are_even_in_tokens() -> None:
    space = _space([900, 800, 700, 500, 400, 300, 200, 100])
    shards = space.partition(Layout((0, 1), 2, "balanced")).shards
    assert sorted(int(space.tokens[rows].sum()) for rows in shards) == [1900, 2000]


def test_rows_that_are_even_already_do_not_move() -> None:
    space = _space([500, 100, 100, 500])
    assert space.partition(Layout((0, 1), 2, "balanced")) is space.partition(HOME)


def test_balance_off_keeps_rows_where_they_were_made() -> None:
    space = _space([900, 900, 100, 100], balance=Balance("off"))
    assert space.partition(Layout((0, 1), 2, "balanced")) is space.partition(HOME)


def test_a_long_row_is_balanced_by_its_quadratic_cost() -> None:
    tokens, there = [100, 60, 55, 10, 9, 1], Layout((0, 1), 2, "balanced")
    # 100 | 60 55, then 10 and 9 where it is poorer: 119 | 115, then 1: 119 | 116
    assert [rows.tolist() for rows in _space(tokens).partition(there).shards] == [[0, 3, 4], [1, 2, 5]]
    # by t + t^2 the others together stay poorer, 6,942 against 10,100
    long = _space(tokens, balance=Balance(quadratic=1.0))
    assert [rows.tolist() for rows in long.partition(there).shards] == [[0], [1, 2, 3, 4, 5]]


def test_rows_from_one_shard_follow_one_another_in_the_order_of_that_shard() -> None:
    home = Layout((0, 1), 2)
    ids = torch.tensor([[3, 1], [2, 0]])
    shards = [torch.stack([held, held, *[10 ** (3 - held)] * 4]) for held in ids]
    space = RowSpace.of_shards("rollout", home, shards)
    # tokens by id: 1000 100 10 1; one shard reads all: those of shard 0 as it holds them, then those of shard 1
    assert space.partition(Layout((0, 1), 1, "balanced")).shards[0].tolist() == [3, 1, 2, 0]


def test_the_predicted_savings_and_cost_of_moving_rows_are_recorded() -> None:
    space = _space([300, 300, 100, 100], balance=Balance(tokens_per_s=100, bytes_per_token=10, bytes_per_s=1000))
    assert space.predicted == Predicted()
    space.partition(Layout((0, 1), 2, "balanced"))
    # 600 -> 400 tokens at 100/s; rows 0 and 2 go to shard 0 and rows 1 and 3 to shard 1, where row 1's 3,000 bytes come
    assert space.predicted == Predicted(2.0, 3.0)
    space.partition(Layout((0, 1), 1, "balanced"))
    assert space.predicted == Predicted(2.0, 3.0), "where shards differ in number there is no choice"


def test_rows_that_go_to_other_ranks_anyway_are_balanced_at_no_cost() -> None:
    dear = Balance(bytes_per_s=1e-6)
    assert _space([300, 300, 100, 100], balance=dear).partition(Layout((0, 1), 2, "balanced")).shards[0].tolist() == [
        0,
        1,
    ]
    elsewhere = _space([300, 300, 100, 100], balance=dear).partition(Layout((2, 3), 2, "balanced"))
    assert elsewhere.shards[0].tolist() == [0, 2]


@given(
    tokens=st.lists(st.integers(1, 900), min_size=1, max_size=40),
    shards=st.sampled_from([1, 3, 4, 5, 6]),
    update=st.none() | st.integers(1, 40),
)
def test_each_mini_batch_is_balanced_in_itself(tokens: list[int], shards: int, update: int | None) -> None:
    space, layout = _space(tokens), Layout(tuple(range(shards)), shards, "balanced", update)
    held = [space.held(layout, rank) for rank in layout.ranks]
    parts = [space.held_mini_batches(layout, rank) for rank in layout.ranks]
    for number, rows in enumerate(space.mini_batches(update)):
        shares = [held[rank][parts[rank][number]] for rank in layout.ranks]
        assert sorted(torch.cat(shares).tolist()) == rows.tolist()
        sums = [int(space.tokens[share].sum()) for share in shares]
        assert max(sums) - min(sums) <= max(tokens)


def test_a_partition_is_computed_once() -> None:
    space, layout = _space([5, 4, 3, 2]), Layout((0, 1), 1, "balanced")
    assert space.partition(layout) is space.partition(Layout((0, 1), 1, "balanced"))


def test_mini_batches_hold_each_row_once_and_the_last_what_is_left() -> None:
    parts = _space([1] * 10).mini_batches(4)
    assert [len(rows) for rows in parts] == [4, 4, 2]
    assert sorted(torch.cat(parts).tolist()) == list(range(10))


# Two prompts: episodes of 1, 3 and 1 rows of the first, and of 2, 1 and 1 of the second.
OF_AGENTS = [1, 1, 0, 0, 1, 1, 0, 1, 1]


def _of_agents() -> RowSpace:
    path = torch.tensor([[4, row] for row in range(5)] + [[7, row] for row in range(4)])
    numbers = torch.ones(4, 9, dtype=torch.int64)
    numbers[NUMBERS.index("begins")] = torch.tensor(OF_AGENTS)
    rows = torch.cat([path.T, numbers])
    return RowSpace.of_shards("rollout", HOME, [rows[:, :5], rows[:, 5:]])


def test_rows_know_their_episode() -> None:
    space = _of_agents()
    assert space.episodes.tolist() == [0, 1, 1, 1, 2, 3, 3, 4, 5]
    assert space_from_message(space_to_message(space)).begins.tolist() == OF_AGENTS
    assert space.of_roots(torch.tensor([7]), [HOME]).episodes.tolist() == [0, 0, 1, 2]
    parts = [space.of_roots(torch.tensor([root]), [HOME]) for root in (7, 4)]
    assert RowSpace.joined(parts, [HOME]).begins.tolist() == OF_AGENTS


def test_a_mini_batch_of_episodes_has_all_of_their_rows() -> None:
    space = _of_agents()
    of_episodes = [space.episodes[rows] for rows in space.mini_batches(2, whole_episodes=True)]
    assert [len(set(numbers.tolist())) for numbers in of_episodes] == [2, 2, 2]
    assert torch.cat(of_episodes).sort().values.tolist() == space.episodes.tolist()
    assert [len(rows) for rows in space.mini_batches(2)] == [2, 2, 2, 2, 1]
    layout = Layout((0, 1), 2, "balanced", 2, whole_episodes=True)
    held = [space.held_mini_batches(layout, rank) for rank in (0, 1)]
    for number, numbers in enumerate(of_episodes):
        here = torch.cat([space.held(layout, rank)[held[rank][number]] for rank in (0, 1)])
        assert space.episodes[here.sort().values].tolist() == numbers.tolist()


def test_mini_batches_are_cut_from_shuffled_groups() -> None:
    path = torch.tensor([[group, sample] for group in range(16) for sample in range(4)])
    rows = torch.cat([path.T, torch.ones(4, 64, dtype=torch.int64)])
    space = RowSpace.of_shards("rollout", Layout((0,), 1), [rows])
    of_8 = [[int(root) for root in space.roots[part]] for part in space.mini_batches(8)]
    assert [len(set(roots)) for roots in of_8] == [2] * 8
    assert [root for roots in of_8 for root in roots] != space.roots.tolist()
    of_6 = [len(set(space.roots[part].tolist())) for part in space.mini_batches(6)]
    assert max(of_6) == 2  # 4 + 2 or 2 + 4: a group is cut where a mini-batch is full


def test_mini_batches_differ_between_steps_and_not_between_calls() -> None:
    first, again, next_step = (_space([1] * 32, step=step).mini_batches(8) for step in (0, 0, 1))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(first, next_step, strict=True))


def test_one_mini_batch_of_all_keeps_the_order_of_ids() -> None:
    assert [rows.tolist() for rows in _space([1] * 4).mini_batches(None)] == [[0, 1, 2, 3]]


# prompt 7 has two questions of 2 and 1 answers, prompt 4 one of 2, prompt 9 one of 1; made in two halves, out of order
TREE = [[[7, 1, 0], [7, 0, 0], [7, 0, 1]], [[9, 0, 0], [4, 0, 1], [4, 0, 0]]]
QUESTIONS = [[[7, 0], [7, 1]], [[4, 0], [9, 0]]]


def _below(name: str, shards: list[list[list[int]]], above: tuple[str, ...]) -> RowSpace:
    """Rows of these paths, each of one token."""
    paths = [torch.tensor(paths).T for paths in shards]
    numbers = [torch.ones(4, path.shape[1], dtype=torch.int64) for path in paths]
    both = [torch.cat(each) for each in zip(paths, numbers, strict=True)]
    return RowSpace.of_shards(name, HOME, both, above=above)


def test_rows_of_three_levels_lie_in_path_order_and_are_dealt_by_whole_trees() -> None:
    space = _below("answer", TREE, ("batch", "question"))
    assert space.levels == ("batch", "question", "answer")
    assert space.path.tolist() == [[4, 0, 0], [4, 0, 1], [7, 0, 0], [7, 0, 1], [7, 1, 0], [9, 0, 0]]
    assert [rows.tolist() for rows in space.partition(HOME).shards] == [[4, 2, 3], [5, 1, 0]]
    # rows 0 and 1, 2 to 4, and 5 are trees: their middles 1, 3.5 and 5.5 of 6 fall to shards 0, 1 and 2 of 3
    shards = space.partition(Layout((0, 1, 2), 3)).shards
    assert [rows.tolist() for rows in shards] == [[0, 1], [2, 3, 4], [5]]


def test_a_row_sees_the_row_of_each_level_that_it_descends_from() -> None:
    answers, questions = _below("answer", TREE, ("batch", "question")), _below("question", QUESTIONS, ("batch",))
    prompts = _below("batch", [[[7]], [[4], [9]]], ("batch",))
    # questions in order: 4.0, 7.0, 7.1, 9.0; prompts: 4, 7, 9
    assert questions._ancestors_of(answers).tolist() == [0, 0, 1, 1, 2, 3]
    assert prompts._ancestors_of(answers).tolist() == [0, 0, 1, 1, 1, 2]
    assert prompts._ancestors_of(questions).tolist() == [0, 1, 1, 2]


def test_rows_of_three_levels_are_the_same_after_a_message() -> None:
    space = _below("answer", TREE, ("batch", "question"))
    found = space_from_message(space_to_message(space))
    assert found.levels == space.levels
    assert torch.equal(found.path, space.path)
    assert [rows.tolist() for rows in found.partition(HOME).shards] == [[4, 2, 3], [5, 1, 0]]
    assert found.of_roots(torch.tensor([4, 9]), [HOME]).path.tolist() == [[4, 0, 0], [4, 0, 1], [9, 0, 0]]
