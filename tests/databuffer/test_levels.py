"""Values of rows below, read by nodes of rows above: all descendants of each, wherever they were made."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rlflow.databuffer.balance import Balance
from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.route import Partition
from rlflow.databuffer.rows import RowSpace, ancestors, space_from_message, space_to_message, with_parents
from rlflow.databuffer.transport import Transport
from rlflow.values.column_kinds import PerSample, PerToken
from rlflow.values.layout import Layout
from tests.ranks import RankPool

MADE, READ = Layout((0, 1), 2), Layout((0, 1), 2, "balanced")
# Prompts 0 and 1, of 5 tokens each, are made on rank 0; 2 and 3, of 1 token, on rank 1. Read, each rank has one of each
PROMPTS = [[0, 1], [2, 3]]
BELOW = [[(1, 1), (0, 0), (1, 0), (1, 2)], [(3, 0)]]  # (prompt, child), in the order in which each rank made them


def _space(name: str, shards: list[list[tuple[int, ...]]], tokens: dict[int, int]) -> RowSpace:
    def of(rows: list[tuple[int, ...]]) -> torch.Tensor:
        path, zeros = torch.tensor(rows, dtype=torch.int64).view(len(rows), -1), torch.zeros(1, len(rows))
        lengths = torch.tensor([[tokens[row[0]] for row in rows]])
        return torch.cat([path.T, lengths, lengths, zeros.long(), zeros.long() + 1])

    return RowSpace.of_shards(name, MADE, [of(rows) for rows in shards]).at(balance=Balance(bytes_per_s=1e30))


def _read_above() -> tuple[list[int], list[float], list[list[float]], int]:
    tokens = {0: 5, 1: 5, 2: 1, 3: 1}
    prompts = _space("batch", [[(i,) for i in ids] for ids in PROMPTS], tokens)
    samples = _space("rollout", BELOW, tokens)
    rank = dist.get_rank()
    buffer = DataBuffer(Transport(torch.device("cpu")))
    mine = torch.tensor([10.0 * prompt + child for prompt, child in BELOW[rank]])
    buffer.put("score", mine, PerSample, samples, MADE)
    buffer.put("by_token", mine[:, None].expand(-1, 5).clone(), PerToken, samples, MADE)
    buffer.issue("score", READ, prompts)
    buffer.issue("by_token", READ, prompts)
    counts = prompts.counts_below(prompts.held(READ, rank), samples)
    found = buffer.get("by_token", READ, prompts)
    return counts.tolist(), buffer.get("score", READ, prompts).tolist(), found.tolist(), buffer.bytes_sent


def test_each_row_above_gets_all_rows_below_it_in_the_order_of_their_paths(ranks2: RankPool) -> None:
    (counts, scores, _, _), (others, of_others, by_token, _) = ranks2.run(_read_above)
    assert (counts, scores) == ([1, 0], [0.0])
    assert (others, of_others) == ([3, 1], [10.0, 11.0, 12.0, 30.0])
    assert [row[0] for row in by_token] == of_others


def test_nothing_travels_where_whole_trees_lie_together(ranks2: RankPool) -> None:
    assert ranks2.run(_read_at_home) == [([1, 3], [0.0, 10.0, 11.0, 12.0], 0), ([0, 1], [30.0], 0)]


def _read_at_home() -> tuple[list[int], list[float], int]:
    tokens = dict.fromkeys(range(4), 1)
    prompts = _space("batch", [[(i,) for i in ids] for ids in PROMPTS], tokens)
    samples = _space("rollout", BELOW, tokens)
    rank = dist.get_rank()
    buffer = DataBuffer(Transport(torch.device("cpu")))
    buffer.put("score", torch.tensor([10.0 * of + child for of, child in BELOW[rank]]), PerSample, samples, MADE)
    buffer.issue("score", MADE, prompts)
    counts = prompts.counts_below(prompts.held(MADE, rank), samples)
    return counts.tolist(), buffer.get("score", MADE, prompts).tolist(), buffer.bytes_sent


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 2)), unique=True), st.data())
def test_descendants_follow_the_order_of_their_ancestors_then_their_paths(
    rows: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    below = sorted(rows)
    above = sorted({row[:2] for row in rows} | {(9, 9)})
    order = data.draw(st.permutations(range(len(above))))
    cut = data.draw(st.integers(0, len(above)))
    read = Partition((torch.tensor(order[:cut], dtype=torch.int64), torch.tensor(order[cut:], dtype=torch.int64)))
    paths = torch.tensor(below, dtype=torch.int64).view(len(below), 3)
    parents = ancestors(torch.tensor(above), paths)
    assert parents.tolist() == [above.index(row[:2]) for row in below]
    found = [rows.tolist() for rows in with_parents(parents, read).shards]
    shares = (order[:cut], order[cut:])
    assert found == [[i for of in share for i, row in enumerate(below) if row[:2] == above[of]] for share in shares]


def test_a_row_without_an_ancestor_has_the_index_minus_1() -> None:
    assert ancestors(torch.tensor([[1, 0], [1, 2]]), torch.tensor([[1, 1, 0], [1, 2, 0], [9, 9, 9]])).tolist() == [
        -1,
        1,
        -1,
    ]
    assert ancestors(torch.empty(0, 1, dtype=torch.int64), torch.tensor([[3, 0]])).tolist() == [-1]


def _marked() -> dict[str, RowSpace]:
    """Prompts, samples of them, samples of another branch, and rows below the first samples."""
    tokens = dict.fromkeys(range(4), 1)
    levels = {
        "batch": ([[(0,), (1,)], [(2,), (3,)]], ("batch",)),
        "rollout": ([[(0, 0), (0, 1), (1, 0)], [(2, 0), (2, 1)]], ("batch",)),
        "greedy": ([[(0, 0), (1, 0)], [(2, 0), (3, 0)]], ("batch",)),
        "answer": ([[(0, 0, 0), (0, 1, 0), (0, 1, 1)], [(2, 1, 0)]], ("batch", "rollout")),
    }
    return {name: replace(_space(name, rows, tokens), above=above) for name, (rows, above) in levels.items()}


def _paths(space: RowSpace, which: torch.Tensor) -> list[list[int]]:
    found: list[list[int]] = space.path[which].tolist()
    return found


def test_dropped_samples_take_rows_below_and_emptied_rows_above_along() -> None:
    spaces = _marked()
    rollout = spaces["rollout"]
    rollout.drop(torch.tensor([[0, 1], [1, 0]]))
    assert _paths(rollout, rollout.dropped) == [[0, 1], [1, 0]]
    assert _paths(spaces["answer"], spaces["answer"].dropped_with(rollout)) == [[0, 1, 0], [0, 1, 1]]
    assert _paths(spaces["batch"], spaces["batch"].dropped_with(rollout)) == [[1]]  # 3 has no samples at all
    assert _paths(spaces["greedy"], spaces["greedy"].dropped_with(rollout)) == [[0, 0], [1, 0]]  # with the prompt
    rollout.drop(torch.empty(0, 2, dtype=torch.int64))
    assert int(rollout.dropped.sum()) == 2


def test_the_mark_goes_wherever_rows_go() -> None:
    rollout = _marked()["rollout"]
    rollout.drop(torch.tensor([[0, 1], [2, 0]]))
    sent = space_from_message(space_to_message(rollout))
    assert sent.dropped.tolist() == rollout.dropped.tolist()
    part = rollout.of_roots(torch.tensor([2]), [MADE])
    assert _paths(part, part.dropped) == [[2, 0]]
    joined = RowSpace.joined([rollout.of_roots(torch.tensor([0, 1]), [MADE]), part], [MADE])
    assert _paths(joined, joined.dropped) == [[0, 1], [2, 0]]
    later = joined.at(seed=0, step=1, balance=Balance())
    later.drop(torch.tensor([[1, 0]]))
    assert int(later.dropped.sum()) == 3
    assert int(joined.dropped.sum()) == 2
