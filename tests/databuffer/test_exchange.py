"""Values on their way between layouts, over real processes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.data.loader import collate_pairs
from rlflow.data.prompts import Example
from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.rows import RowSpace, space_from_message, space_to_message
from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError
from rlflow.values.batch import Pairs
from rlflow.values.column_kinds import PerSample, PerToken
from rlflow.values.columns import take_rows
from rlflow.values.layout import Layout
from rlflow.values.ragged import Ragged
from tests.databuffer.all_column_kinds import Everything, differences, everything
from tests.ranks import RankPool

# ---- Any value, from any layout to any other


@dataclass(frozen=True)
class Case:
    """Samples of some prompts in a layout, and a layout to bring them to.

    Attributes:
        source: Layout in which they are made, in whole groups.
        target: Layout in which they are read.
        dealt: For each shard of `source` the groups that it makes, in its order.
        group_size: Samples of each group.
        lengths: Response length by id; the samples of group g are g * group_size, g * group_size + 1, ...
    """

    source: Layout
    target: Layout
    dealt: tuple[tuple[int, ...], ...]
    group_size: int
    lengths: tuple[int, ...]

    def ids(self, shard: int) -> list[int]:
        return [group * self.group_size + i for group in self.dealt[shard] for i in range(self.group_size)]


@dataclass(frozen=True)
class Seen:
    """The results of an exchange on one rank; rows are None outside the target."""

    found: Everything | None
    positions: list[int]
    bytes_sent: int
    bytes_received: int


def layouts(draw: st.DrawFn, world_size: int, shard_by: str | None = None) -> Layout:
    ranks = draw(st.sets(st.integers(0, world_size - 1), min_size=1))
    shards = draw(st.sampled_from([n for n in range(1, world_size + 1) if len(ranks) % n == 0]))
    shard_by = shard_by or draw(st.sampled_from(["groups", "balanced"]))
    update = draw(st.none() | st.integers(1, 12)) if shard_by == "balanced" else None
    return Layout(tuple(sorted(ranks)), shards, shard_by, update)  # type: ignore[arg-type]


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> Case:
    source = layouts(draw, world_size, "groups")
    groups, group_size = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    shard_of = draw(st.lists(st.integers(0, source.shards - 1), min_size=groups, max_size=groups))
    made_in_order = draw(st.permutations(range(groups)))
    dealt = tuple(tuple(g for g in made_in_order if shard_of[g] == shard) for shard in range(source.shards))
    rows = groups * group_size
    lengths = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    return Case(source, layouts(draw, world_size), dealt, group_size, tuple(lengths))


@cache
def _transport() -> Transport:
    """This process's, with groups for any layouts."""
    transport = Transport()
    ranks = range(transport.world_size)
    transport.form_groups(group for size in ranks for group in itertools.combinations(ranks, size) if size > 1)
    return transport


def _bring(case: Case) -> Seen:
    transport = _transport()
    rank = transport.rank
    ids = case.ids(case.source.shard(rank)) if rank in case.source.ranks else []
    at = torch.tensor(ids, dtype=torch.int64)
    lengths = torch.tensor(case.lengths)[at]
    space = None
    if rank in case.source.ranks:
        path = torch.stack([at // case.group_size, at], dim=1)
        space = RowSpace.gather("rollout", transport, case.source, path=path, lengths=lengths, tokens=lengths + 1)
    message = None if space is None else space_to_message(space)
    everyone, source = tuple(range(transport.world_size)), case.source.ranks[0]
    message = transport.broadcast_bytes(message if rank == source else None, source, everyone)
    space = space or space_from_message(message)
    if rank not in {*case.source.ranks, *case.target.ranks}:
        return Seen(None, [], 0, 0)
    buffer = DataBuffer(transport)
    made = everything(ids, dict(enumerate(case.lengths))) if rank in case.source.ranks else None
    buffer.put("rollout", made, Everything, space, case.source)
    buffer.issue("rollout", case.target)
    found = buffer.get("rollout", case.target) if rank in case.target.ranks else None
    buffer.free("rollout")
    positions = space.held(case.target, rank).tolist()
    return Seen(found, positions, buffer.bytes_sent, buffer.bytes_received)


def _check_all_rows_arrive(ranks: RankPool, case: Case) -> None:
    seen = ranks.run(_bring, case)
    length_of = dict(enumerate(case.lengths))
    by_shard = [[seen[rank].found.ids.tolist() for rank in case.target.peers(s)] for s in range(case.target.shards)]
    assert all(peer == peers[0] for peers in by_shard for peer in peers), "peers hold the same rows"
    assert sorted(i for peers in by_shard for i in peers[0]) == list(range(len(case.lengths))), "each row once"
    for rank in case.target.ranks:
        ids = seen[rank].found.ids.tolist()
        assert ids == seen[rank].positions, "in the order of the row space, whose ids are 0, 1, ... here"
        assert differences(seen[rank].found, everything(ids, length_of)) == []
    if case.target.shard_by == "groups":
        shards_of_group = {(i // case.group_size, s) for s, peers in enumerate(by_shard) for i in peers[0]}
        assert len(shards_of_group) == len(case.lengths) // case.group_size, "groups are whole"
    assert sum(one.bytes_sent for one in seen) == sum(one.bytes_received for one in seen)


@settings(deadline=None, max_examples=15)
@given(case=cases(2))
def test_all_rows_arrive_once_and_unchanged_among_2_ranks(ranks2: RankPool, case: Case) -> None:
    _check_all_rows_arrive(ranks2, case)


@settings(deadline=None, max_examples=15)
@given(case=cases(3))
def test_all_rows_arrive_once_and_unchanged_among_3_ranks(ranks3: RankPool, case: Case) -> None:
    _check_all_rows_arrive(ranks3, case)


@settings(deadline=None, max_examples=15)
@given(case=cases(4))
def test_all_rows_arrive_once_and_unchanged_among_4_ranks(ranks4: RankPool, case: Case) -> None:
    _check_all_rows_arrive(ranks4, case)


# ---- Cases worked by hand

TWO = Layout((0, 1), 2)
ONE_OF_TWO_PEERS = Layout((0, 1), 1)


def _space(layout: Layout, shards: list[list[int]], lengths: list[int]) -> RowSpace:
    """Rows by id, each a group of its own; `lengths` by id."""
    arrays = [
        torch.tensor(
            [ids, ids, [lengths[i] for i in ids], [lengths[i] for i in ids], [-1] * len(ids), [1] * len(ids)],
            dtype=torch.int64,
        )
        for ids in shards
    ]
    return RowSpace.of_shards("rollout", layout, arrays)


def _sent_by_each_of_two_peers() -> tuple[int, list[int]]:
    """Both ranks hold both rows of 3 and 1 bytes; two shards read one row each."""
    space = _space(ONE_OF_TWO_PEERS, [[0, 1]], [3, 1])
    buffer = DataBuffer(_transport())
    value = torch.tensor([[True, True, True], [True, False, False]])
    buffer.put("mask", value, PerToken, space, ONE_OF_TWO_PEERS)
    buffer.issue("mask", TWO)
    found = buffer.get("mask", TWO)
    return buffer.bytes_sent, list(found.shape)


def test_what_a_peer_holds_is_not_sent_to_it(ranks2: RankPool) -> None:
    assert ranks2.run(_sent_by_each_of_two_peers) == [(0, [1, 3]), (0, [1, 1])]


def _sent_by_peers_to_a_third() -> int:
    """Ranks 0 and 1 hold the same row of 4 bytes, rank 2 reads it."""
    source, target = Layout((0, 1), 1), Layout((2,), 1)
    space = _space(source, [[0]], [1])
    buffer = DataBuffer(_transport())
    buffer.put("number", None if dist.get_rank() == 2 else torch.tensor([0.5]), PerSample, space, source)
    buffer.issue("number", target)
    if dist.get_rank() == 2:
        assert buffer.get("number", target).tolist() == [0.5]
    return buffer.bytes_sent


def test_one_of_several_peers_publishes(ranks3: RankPool) -> None:
    assert ranks3.run(_sent_by_peers_to_a_third) == [4, 0, 0]


class Counted(Transport):
    """Counts the all-to-alls."""

    count = 0

    def all_to_all(self, *given: Any) -> Any:
        self.count += 1
        return super().all_to_all(*given)


def _gathered_bytes() -> tuple[int, int, int]:
    """Rows of 3 and 2 responses tokens on two ranks; int64 tokens and a float32 number; both read all."""
    space = _space(TWO, [[0], [1]], [3, 2])
    rank = dist.get_rank()
    transport = Counted()
    buffer = DataBuffer(transport)
    buffer.put("tokens", torch.full((1, 5), rank), PerToken, space, TWO)  # padded to 5: the padding is not sent
    buffer.put("number", torch.tensor([0.5]), PerSample, space, TWO)
    for name in ("tokens", "number"):
        buffer.issue(name, ONE_OF_TWO_PEERS)
    assert buffer.get("tokens", ONE_OF_TWO_PEERS).tolist() == [[0, 0, 0], [1, 1, 0]]
    assert buffer.get("number", ONE_OF_TWO_PEERS).tolist() == [0.5, 0.5]
    return buffer.bytes_sent, buffer.bytes_received, transport.count


def test_only_payload_travels_where_the_row_space_knows_the_lengths(ranks2: RankPool) -> None:
    # rank 0 sends 3 tokens x 8 bytes + 4 bytes, rank 1 sends 2 x 8 + 4; one all-to-all for each of the two values
    assert ranks2.run(_gathered_bytes) == [(28, 20, 2), (20, 28, 2)]


def _ragged_bytes() -> tuple[int, int, int]:
    """Rank 0 has one row of 4 entries, rank 1 one of none; both read both."""
    space = _space(TWO, [[0], [1]], [0, 0])
    rank = dist.get_rank()
    transport = Counted()
    buffer = DataBuffer(transport)
    buffer.put("prompt", Ragged.from_lists([[7, 7, 7, 7]] if rank == 0 else [[]]), Ragged, space, TWO)
    buffer.issue("prompt", ONE_OF_TWO_PEERS)
    found = buffer.get("prompt", ONE_OF_TWO_PEERS)
    assert found.lengths.tolist() == [4, 0]
    assert found.values.tolist() == [7, 7, 7, 7]
    return buffer.bytes_sent, buffer.bytes_received, transport.count


def test_the_sizes_of_ragged_rows_are_sent_first_and_are_not_counted_as_payload(ranks2: RankPool) -> None:
    assert ranks2.run(_ragged_bytes) == [(32, 0, 2), (0, 32, 2)]


def _prompts_beside_samples() -> tuple[list[int], int]:
    """Prompts 0, 1 on rank 0 and 2, 3 on rank 1, three samples of each: 9 tokens in those of the first two prompts."""
    none = torch.tensor([[0, 0], [0, 0], [-1, -1], [1, 1]])
    prompts = RowSpace.of_shards("batch", TWO, [torch.cat([torch.tensor([ids]), none]) for ids in ([0, 1], [2, 3])])
    samples = RowSpace.of_shards("rollout", TWO, [_samples([0, 1], [9, 9]), _samples([2, 3], [1, 1])])
    read_at = Layout((0, 1), 2, "balanced")
    buffer = DataBuffer(_transport())
    mine = [0, 1] if dist.get_rank() == 0 else [2, 3]
    buffer.put("level", torch.tensor(mine) * 10, PerSample, prompts, TWO)
    buffer.issue("level", read_at, samples)
    return buffer.get("level", read_at, samples).tolist(), buffer.bytes_received


def _samples(prompts: list[int], tokens: list[int]) -> torch.Tensor:
    ids = [prompt * 3 + i for prompt in prompts for i in range(3)]
    groups = [prompt for prompt in prompts for _ in range(3)]
    lengths = [count for count in tokens for _ in range(3)]
    return torch.tensor([groups, ids, lengths, lengths, [0] * len(ids), [1] * len(ids)], dtype=torch.int64)


def test_each_sample_sees_its_prompts_value_which_comes_once(ranks2: RankPool) -> None:
    # one prompt of either kind for each rank, which lacks one value of 8 bytes
    assert ranks2.run(_prompts_beside_samples) == [([0, 0, 0, 20, 20, 20], 8), ([10, 10, 10, 30, 30, 30], 8)]


def _home_texts(columns: tuple[str, ...] | None) -> tuple[object, object]:
    """Rank 0 makes both rows, rank 1 none; then they are split, and rank 0 reads both."""
    space = _space(TWO, [[0, 1], []], [1, 1])
    mine = [0, 1] if dist.get_rank() == 0 else []
    buffer = DataBuffer(_transport())
    buffer.put("rollout", everything(mine, {0: 1, 1: 1}), Everything, space, TWO)
    halves, all_on_0 = Layout((0, 1), 2, "balanced"), Layout((0,), 1)
    buffer.issue("rollout", halves, columns=columns)
    split = buffer.get("rollout", halves)
    if dist.get_rank() == 1:
        return split.texts, None
    buffer.issue("rollout", all_on_0, columns=columns)
    return split.texts, buffer.get("rollout", all_on_0).texts


def test_home_columns_are_absent_unless_they_are_named(ranks2: RankPool) -> None:
    (split, whole), (came, _) = ranks2.run(_home_texts, None)
    assert repr(split) == repr(came) == "<texts: not sent here>"
    assert whole == ["text 0", "text 1"], "these are the very rows that were made"


def test_home_columns_that_are_named_travel(ranks2: RankPool) -> None:
    assert ranks2.run(_home_texts, ("ids", "texts")) == [(["text 0"], ["text 0", "text 1"]), (["text 1"], None)]


def _overlapping_exchanges() -> tuple[list[int], list[int]]:
    space = _space(TWO, [[0], [1]], [1, 1])
    buffer = DataBuffer(_transport())
    rank = dist.get_rank()
    for name, value in (("first", rank), ("second", 10 + rank)):
        buffer.put(name, torch.tensor([value]), PerSample, space, TWO)
        buffer.issue(name, ONE_OF_TWO_PEERS)
    names = ("first", "second") if rank == 0 else ("second", "first")  # each rank reads in an order of its own
    found = {name: buffer.get(name, ONE_OF_TWO_PEERS).tolist() for name in names}
    return found["first"], found["second"]


def test_values_issued_in_one_order_may_be_read_in_any(ranks2: RankPool) -> None:
    assert ranks2.run(_overlapping_exchanges) == [([0, 1], [10, 11])] * 2


@pytest.mark.parametrize("rows", [0, 1])
def test_a_space_of_no_row_and_of_one_row_travels(ranks2: RankPool, rows: int) -> None:
    case = Case(TWO, Layout((0, 1), 2, "balanced", 4), ((0,) if rows else (), ()), 1, (5,) * rows)
    _check_all_rows_arrive(ranks2, case)


def _pairs_by_cost() -> list[tuple[list[int], list[int], list[int], dict[str, int]]]:
    """The prompt, chosen, rejected ids and row of the pairs that a rank reads balanced; each rank made two of four."""
    chosen, rejected = (2, 90, 3, 1), (99, 4, 1, 2)  # response tokens: pairs 0 and 1 are dear, each by another side
    ids = torch.tensor([0, 1] if dist.get_rank() == 0 else [2, 3])
    examples = [Example({"number": i}, [i] * (i + 1), [i] * chosen[i], [10 + i] * rejected[i]) for i in ids.tolist()]
    pairs = collate_pairs(examples)
    nothing = torch.zeros_like(ids)
    space = RowSpace.gather("batch", _transport(), TWO, path=ids[:, None], lengths=nothing, tokens=pairs.tokens)
    buffer, balanced = DataBuffer(_transport()), Layout((0, 1), 2, "balanced")
    buffer.put("batch", pairs, Pairs, space, TWO)
    buffer.issue("batch", balanced, columns=("prompt_ids", "chosen_ids", "rejected_ids", "rows"))
    read: Pairs = buffer.get("batch", balanced)
    columns = [[row.tolist() for row in ids.rows()] for ids in (read.prompt_ids, read.chosen_ids, read.rejected_ids)]
    return list(zip(*columns, read.rows, strict=True))


def test_pairs_travel_whole_and_are_balanced_by_the_tokens_of_both_responses(ranks2: RankPool) -> None:
    def pair(i: int, chosen: int, rejected: int) -> tuple[list[int], list[int], list[int], dict[str, int]]:
        return [i] * (i + 1), [i] * chosen, [10 + i] * rejected, {"number": i}

    # Tokens: 0: 2 + 2 + 99 = 103; 1: 4 + 90 + 4 = 98; 2: 6 + 3 + 1 = 10; 3: 8 + 1 + 2 = 11. So 0 with 2, 1 with 3.
    assert ranks2.run(_pairs_by_cost) == [[pair(0, 2, 99), pair(2, 3, 1)], [pair(1, 90, 4), pair(3, 1, 2)]]


def _only_two_columns() -> tuple[list[int], list[list[int]], str, int]:
    """Two rows, split and swapped: of a value with every column two are read."""
    space = _space(TWO, [[0, 1], []], [1, 2])
    mine = [0, 1] if dist.get_rank() == 0 else []
    buffer = DataBuffer(_transport())
    buffer.put("rollout", everything(mine, {0: 1, 1: 2}), Everything, space, TWO)
    halves = Layout((0, 1), 2, "balanced")
    buffer.issue("rollout", halves, columns=("ids", "response"))
    found: Everything = buffer.get("rollout", halves)
    taken: Everything = take_rows(found, Everything, torch.tensor([0]))
    with pytest.raises(UserError, match="`mask` was not sent here") as refusal:
        taken.mask.sum()
    for use in (
        lambda: found.mask[0],
        lambda: found.logprobs * 2,
        lambda: torch.exp(found.logprobs),
        lambda: len(found.rows),
    ):
        with pytest.raises(UserError, match="was not sent here"):
            use()
    return found.ids.tolist(), found.response.tolist(), str(refusal.value), buffer.bytes_received


def test_only_the_columns_that_are_read_travel_and_any_use_of_another_raises(ranks2: RankPool) -> None:
    # rank 1 gets an id of 8 bytes and a response of one token of 8 bytes: of rows of 2 and 3 tokens the dearer stays
    (kept, kept_response, _, nothing), (came, response, text, received) = ranks2.run(_only_two_columns)
    assert (kept, kept_response, nothing) == ([1], [[100, 101]], 0)
    assert (came, response, received) == ([0], [[0]], 16)
    assert text == "`mask` was not sent here; let the type of a node's parameter name `mask`"
