"""Row spaces: the paths, lengths and partitions of rows, which do not depend on values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import Tensor

from rlflow.databuffer.balance import AUTO, Balance, Predicted, deal, group_partition, grouped
from rlflow.databuffer.route import Partition, Route
from rlflow.databuffer.transport import Transport, from_message, to_message
from rlflow.values.layout import Layout
from rlflow.values.path import RowPath, hashed, lexicographic

ROOT = ("batch",)  # the level of prompts, above which there is none
NUMBERS = ("lengths", "tokens", "versions", "begins")  # numbers of each row, gathered in this order after its path
_SIZE = torch.int64.itemsize


@dataclass(frozen=True, eq=False)
class RowSpace:
    """The rows of one step, the same object on every rank: prompts, or the samples that a rollout node made of them.

    All arrays are int64, and `dropped` is bool; they are on the CPU, in the order of the paths: by their first numbers,
    then their second, and so on. Two samples of each of two prompts, made on ranks 0 and 1 and trained on balanced:

        name       "rollout"
        path       4 0       4 1       7 0       7 1
        lengths    3         2         7         7
        tokens     5         4         10        10
        versions   3         3         3         3
        begins     1         1         1         1
        origin     (Layout((0, 1), 2), rows 0 1 on rank 0 and rows 2 3 on rank 1)

        partition(Layout((0, 1), 2, "balanced")) may be rows 0 2 and rows 1 3: 15 and 14 tokens in place of 9 and 20

    Attributes:
        name: Name of the rows: "batch", or the node that made them.
        path: `[N, depth]`, distinct over the whole run: the id of a row's prompt, then the number of each child below.
        lengths: `[N]`, response tokens: where `PerToken` columns are cut.
        tokens: `[N]`, prompt and response tokens: what a row costs in a forward pass.
        versions: `[N]`, version of the policy that generated the row; -1 where none did.
        begins: `[N]`, 1 where a row begins an episode, 0 where it is a further row of the episode before it. The rows
            of an episode follow one another, below one prompt.
        dropped: `[N]` bool, whether a reward whose `on_error` is `drop` failed on the row; set when rows are scored.
        lies: Partitions by layout: first that of the layout in which the rows were made, then those that cannot be
            computed from the rows, such as after a filter has removed some.
        above: Names of the levels above, prompts first.
        seed: Seed of the run; with `step` it decides which rows share a mini-batch.
        step: Step of the run, from 0.
        balance: Whether rows move to even out their cost.
    """

    name: str
    path: Tensor
    lengths: Tensor
    tokens: Tensor
    versions: Tensor
    begins: Tensor
    dropped: Tensor
    lies: Mapping[Layout, Partition]
    above: tuple[str, ...] = ROOT
    seed: int = 0
    step: int = 0
    balance: Balance = AUTO
    _dealt: dict[Layout, tuple[Partition, Predicted]] = field(default_factory=dict, init=False, repr=False)
    _routes: dict[tuple[int, Layout, Layout, RowSpace], Route] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def gather(
        cls,
        name: str,
        transport: Transport,
        layout: Layout,
        *,
        path: Tensor,
        lengths: Tensor,
        tokens: Tensor,
        versions: Tensor | None = None,
        begins: Tensor | None = None,
        above: tuple[str, ...] = ROOT,
    ) -> RowSpace:
        """Share the rows of the shards of `layout` with all of its ranks. A collective of these ranks.

        The arrays are those of a space, for the rows of this rank's shard in the shard's order. Where several peers
        hold the same rows, only the arrays of the first peer count.
        """
        versions = torch.full_like(lengths, -1) if versions is None else versions
        begins = torch.ones_like(lengths) if begins is None else begins
        every = (*path.unbind(dim=1), lengths, tokens, versions, begins)
        arrays = torch.stack([array.to("cpu", torch.int64) for array in every])
        gathered = transport.all_gather_ragged(arrays.flatten(), layout.ranks)
        shards = [of_rank.view(len(arrays), -1) for of_rank in gathered[:: layout.copies]]
        return cls.of_shards(name, layout, shards, above)

    @classmethod
    def of_shards(cls, name: str, layout: Layout, shards: Sequence[Tensor], above: tuple[str, ...] = ROOT) -> RowSpace:
        """The space of rows that all ranks know already.

        Args:
            name: Name of the rows.
            layout: Layout in which they were made.
            shards: For each shard of `layout` `[depth + 4, n]` int64: the paths of its rows, then their `NUMBERS`.
            above: Names of the levels above, prompts first.
        """
        rows = torch.cat(list(shards), dim=1)  # [depth + 4, N]
        path = rows[: -len(NUMBERS)].T  # [N, depth]
        in_order = lexicographic(path)
        path = _distinct(path[in_order].contiguous(), name)
        lengths, tokens, versions, begins = rows[-len(NUMBERS) :, in_order]
        position = torch.empty_like(in_order)
        position[in_order] = torch.arange(len(in_order))
        made = Partition(position.split([shard.shape[1] for shard in shards]))
        dropped = torch.zeros(len(path), dtype=torch.bool)
        return cls(name, path, lengths, tokens, versions, begins, dropped, {layout: made}, above)

    def at(self, *, seed: int = 0, step: int = 0, balance: Balance = AUTO) -> RowSpace:
        """The same rows and partitions as rows of `step`, where an earlier step or an earlier run made them."""
        return replace(self, dropped=self.dropped.clone(), seed=seed, step=step, balance=balance)

    def __len__(self) -> int:
        return len(self.path)

    @property
    def origin(self) -> tuple[Layout, Partition]:
        """The layout in which the rows were made, and their partition there."""
        return next(iter(self.lies.items()))

    @property
    def levels(self) -> tuple[str, ...]:
        """Names of the levels from the prompts down to these rows."""
        return (*self.above, self.name)[-self.path.shape[1] :]

    @property
    def roots(self) -> Tensor:
        """`[N]`, the id of the prompt that each row descends from."""
        return self.path[:, 0]

    @property
    def episodes(self) -> Tensor:
        """`[N]`, the number of the episode that each row is of, from 0."""
        return self.begins.cumsum(0) - 1

    def paths(self, rows: Tensor | None = None) -> RowPath:
        """Paths of the rows at these positions, or of all rows."""
        return RowPath(self.path if rows is None else self.path[rows], self.levels)

    @property
    def arrays(self) -> dict[str, Tensor]:
        """The tensors that belong to rows, by name."""
        return {"path": self.path, "dropped": self.dropped} | {name: getattr(self, name) for name in NUMBERS}

    def drop(self, paths: Tensor) -> None:
        """Mark as dropped the rows with these paths `[K, depth]`, and the rows above and below them."""
        depth = min(paths.shape[1], self.path.shape[1])
        marked = paths[:, :depth].unique(dim=0)
        self.dropped.logical_or_(ancestors(marked, self.path) >= 0)

    def dropped_with(self, scored: RowSpace) -> Tensor:
        """`[N]` bool, the rows that are left out because rows of another space were dropped.

        A row below a dropped row is left out. A row above is left out if all rows below it were dropped. A row of
        another branch is left out if it and a dropped row descend from one row of the last level that both spaces have.
        """
        common = self.levels_shared_with(scored)
        if common == len(self.levels) < len(scored.levels):
            parents = self._ancestors_of(scored)
            kept = torch.bincount(parents[~scored.dropped], minlength=len(self)) > 0
            return ~kept & (torch.bincount(parents, minlength=len(self)) > 0)
        return ancestors(scored.path[scored.dropped][:, :common].unique(dim=0), self.path) >= 0

    def levels_shared_with(self, other: RowSpace) -> int:
        """Number of levels that rows of both spaces have in common, from the prompts on."""
        pairs = zip(self.levels, other.levels, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def below(self, of: RowSpace, layout: Layout, rank: int) -> Tensor:
        """Positions in the space `of` of the rows below those that `rank` holds here in `layout`, in their order."""
        read = with_parents(self._ancestors_of(of), self.partition(layout))
        return read.shards[layout.shard(rank)]

    def partition(self, layout: Layout) -> Partition:
        """The partition of the rows in `layout`; computed once, the same on all ranks."""
        if layout in self.lies:
            return self.lies[layout]
        if layout not in self._dealt:
            balanced = layout.shard_by == "balanced"
            self._dealt[layout] = self._balanced(layout) if balanced else (self._in_groups(layout), Predicted())
        return self._dealt[layout][0]

    def held(self, layout: Layout, rank: int) -> Tensor:
        """Positions of the rows that `rank` holds in `layout`, in its order; none where it is not in the layout."""
        if rank not in layout.ranks:
            return torch.empty(0, dtype=torch.int64)
        return self.partition(layout).shards[layout.shard(rank)]

    def route(self, rank: int, source: Layout, target: Layout, reader: RowSpace) -> Route:
        """The route of `rank` between `source` and `target`; computed once.

        Args:
            rank: A rank of either layout.
            source: Layout in which they were made.
            target: Layout in which they are read.
            reader: The rows with which they are read: these themselves; rows below them, each with its ancestor; or
                rows above them, each with all of its descendants.
        """
        key = (rank, source, target, reader)
        if key not in self._routes:
            made, read, position = self.partition(source), reader.partition(target), None
            if reader.path.shape[1] < self.path.shape[1]:
                read = with_parents(reader._ancestors_of(self), read)
            elif reader is not self:
                position = self._ancestors_of(reader)
            self._routes[key] = Route(rank, source, target, made, read, position)
        return self._routes[key]

    def counts_below(self, rows: Tensor, of: RowSpace) -> Tensor:
        """`[B]` int64, how many rows of the space `of` are below each of the rows at these positions."""
        counts: Tensor = torch.bincount(self._ancestors_of(of), minlength=len(self))[rows]
        return counts

    def in_order(self, layout: Layout, of_ranks: Sequence[Tensor]) -> Tensor:
        """The entries `[N, ...]` of all rows, ordered by path, from the `[B, ...]` of each of the layout's ranks."""
        ordered = of_ranks[0].new_empty(len(self), *of_ranks[0].shape[1:])
        for positions, of_rank in zip(self.partition(layout).shards, of_ranks[:: layout.copies], strict=True):
            ordered[positions] = of_rank
        return ordered

    def gathered(self, layout: Layout, here: Tensor, transport: Transport, members: tuple[int, ...]) -> Tensor:
        """The entries `[N, ...]` of all rows, in the order of the paths, on all `members`; a collective of the members.

        Args:
            layout: Layout in which the entries are; all its ranks are members.
            here: Entries of this rank, `[B, ...]`; B is 0 where it is not in the layout.
            transport: Transport to the members.
            members: Ranks that get the entries.
        """
        of_members = transport.all_gather_ragged(here.flatten(), members)
        of_ranks = [of_members[members.index(rank)] for rank in layout.ranks]
        return self.in_order(layout, [entries.view(-1, *here.shape[1:]) for entries in of_ranks])

    def of_roots(self, roots: Tensor, layouts: Iterable[Layout]) -> RowSpace:
        """The rows below these prompts, with their partitions in `layouts`; the first layout is that of `origin`."""
        kept = torch.isin(self.roots, roots)
        position = kept.cumsum(0) - 1  # [N], in the new space
        dealt = {
            layout: Partition(tuple(position[rows[kept[rows]]] for rows in self.partition(layout).shards))
            for layout in layouts
        }
        return self.with_rows({name: array[kept] for name, array in self.arrays.items()}, dealt)

    @classmethod
    def joined(cls, parts: Sequence[RowSpace], layouts: Iterable[Layout]) -> RowSpace:
        """The rows of all parts, as rows of the last part's step; in a shard, rows of earlier parts come first.

        Args:
            parts: Row spaces of one name.
            layouts: Layouts whose partitions are joined; the first is that in which the rows were made.
        """
        path = torch.cat([part.path for part in parts])
        order = lexicographic(path)
        _distinct(path[order], parts[0].name)
        arrays = {name: torch.cat([part.arrays[name] for part in parts])[order] for name in parts[0].arrays}
        position = order.argsort()  # position of each row of the parts, one part after the other
        starts = list(accumulate([0, *(len(part) for part in parts[:-1])]))
        dealt = {}
        for layout in layouts:
            of_parts = [part.partition(layout).shards for part in parts]
            shards = zip(*of_parts, strict=True)
            dealt[layout] = Partition(
                tuple(
                    position[torch.cat([i + rows for i, rows in zip(starts, shard, strict=True)])] for shard in shards
                )
            )
        return parts[-1].with_rows(arrays, dealt)

    def with_rows(self, arrays: Mapping[str, Tensor], lies: Mapping[Layout, Partition]) -> RowSpace:
        """A space of other rows with this name and step; `lies` begins with the layout in which they were made."""
        changed: dict[str, Any] = {**arrays, "lies": lies}
        return replace(self, **changed)

    @property
    def predicted(self) -> Predicted:
        """The predicted effect of moving rows, over all layouts dealt so far in which rows could have stayed."""
        return sum((predicted for _, predicted in self._dealt.values()), Predicted())

    def mini_batches(self, samples_per_update: int | None, whole_episodes: bool = False) -> list[Tensor]:
        """Positions of the rows of each mini-batch, ascending: a function of seed, step and paths, never of ranks.

        Args:
            samples_per_update: Rows of a mini-batch; the last has what is left. None for one mini-batch of all.
            whole_episodes: Whether `samples_per_update` counts episodes, which are then whole in a mini-batch.
        """
        update, count = self._updates(samples_per_update, whole_episodes)
        return list(grouped(update, count))

    def held_mini_batches(self, layout: Layout, rank: int) -> list[Tensor]:
        """For each mini-batch of `layout`, which of the rows that `rank` holds belong to it: indices into its rows."""
        update, count = self._updates(layout.samples_per_update, layout.whole_episodes)
        return list(grouped(update[self.held(layout, rank)], count))

    def _updates(self, samples_per_update: int | None, whole_episodes: bool) -> tuple[Tensor, int]:
        """For each row `[N]` the number of its mini-batch, and the number of mini-batches."""
        update = torch.zeros_like(self.lengths)
        if samples_per_update is None:
            return update, 1
        generator = torch.Generator().manual_seed(hashed(f"{self.seed}/{self.step}/{self.name}", size=7))
        roots, group = self.roots.unique(return_inverse=True)
        shuffled = torch.randperm(len(roots), generator=generator)
        in_order = shuffled.argsort()[group].argsort(stable=True)  # the rows of a group follow one another
        counted = self.begins[in_order] if whole_episodes else torch.ones_like(in_order)
        update[in_order] = (counted.cumsum(0) - 1) // samples_per_update
        return update, max(1, -(-int(counted.sum()) // samples_per_update))

    def _ancestors_of(self, reader: RowSpace) -> Tensor:
        """For each row of `reader` the position here of the row that it descends from."""
        positions = ancestors(self.path, reader.path)
        assert not bool((positions < 0).any()), f"rows of `{reader.name}` descend from none of `{self.name}`"
        return positions

    def _in_groups(self, layout: Layout) -> Partition:
        """The partition with all rows of a prompt on one rank: the rank that made them, if possible."""
        made_in, at_origin = self.origin
        if layout.shards == made_in.shards and made_in.shard_by == "groups":
            return at_origin
        if layout.ranks == made_in.ranks and layout.shards % made_in.shards == 0:
            return self._shared_out(at_origin, layout.shards // made_in.shards)
        return Partition(group_partition(self.roots, layout.shards))

    def _balanced(self, layout: Layout) -> tuple[Partition, Predicted]:
        """The partition with nearly even costs; if moving rows does not pay, the one in which they were made."""
        made_in, at_origin = self.origin
        can_stay, predicted = layout.shards == made_in.shards, Predicted()
        if can_stay and self.balance.mode == "off":
            return at_origin, predicted
        update, updates = self._updates(layout.samples_per_update, layout.whole_episodes)
        costs = self.balance.costs(self.tokens, self.lengths, self.path[:, : max(1, self.path.shape[1] - 1)])
        shard = torch.empty_like(self.lengths)
        for rows in grouped(update, updates):
            shard[rows] = deal(costs.take(rows), layout.shards)
        if can_stay:
            here, travels = at_origin.places[0].long(), _travels(made_in, layout)
            predicted = self.balance.predict(self.tokens, costs, update, here, shard, travels)
            if not predicted.pays:
                return at_origin, predicted
        made = torch.cat(at_origin.shards)  # in a shard rows from one rank follow one another, as that rank holds them
        return Partition(tuple(made[held] for held in grouped(shard[made], layout.shards))), predicted

    def _shared_out(self, at_origin: Partition, among: int) -> Partition:
        """Deal the groups of each shard among its own ranks, so that no rank needs rows that another shard made."""
        shares = [(rows, group_partition(self.roots[rows], among)) for rows in at_origin.shards]
        return Partition(tuple(rows[share] for rows, dealt in shares for share in dealt))


def _distinct(path: Tensor, name: str) -> Tensor:
    """The paths `[N, depth]`, in order; asserts that no two are the same."""
    same = (path[1:] == path[:-1]).all(dim=1)
    assert not bool(same.any()), f"two rows of `{name}` have the path {path[:-1][same][0].tolist()}"
    return path


def _travels(here: Layout, there: Layout) -> Tensor:
    """`[S]` bool, for two layouts of S shards: whether a rank lacks rows of a shard though no row changes its shard."""
    return torch.tensor([not {*there.peers(s)} <= {*here.peers(s)} for s in range(there.shards)])


def ancestors(above: Tensor, below: Tensor) -> Tensor:
    """For each row below, the position of the row above from which it descends; -1 where there is none.

    Args:
        above: Paths `[N, depth]`, in order and distinct.
        below: Paths `[M, more]`, in any order.
    """
    depth = above.shape[1]
    wanted = below[:, :depth].contiguous()
    mine, theirs = above[:, 0].contiguous(), wanted[:, 0].contiguous()
    if depth > 1:
        numbered = torch.unique(torch.cat([above, wanted]), dim=0, return_inverse=True)[1]
        mine, theirs = numbered[: len(above)].contiguous(), numbered[len(above) :].contiguous()
    positions = torch.searchsorted(mine, theirs)
    if not len(above):
        return torch.full_like(positions, -1)
    positions = positions.clamp_(max=len(above) - 1)
    return positions.where(mine[positions] == theirs, -1)


def with_parents(parents: Tensor, read: Partition) -> Partition:
    """The partition of rows that are read with their ancestors: ordered by ancestor, then by their own order.

    Args:
        parents: `[M]`, the position of each row's ancestor.
        read: Partition of the ancestors.
    """
    shard, place = (each.long()[parents] for each in read.places)
    order = torch.argsort(place, stable=True)
    order = order[torch.argsort(shard[order], stable=True)]
    counts = torch.bincount(shard, minlength=len(read.shards)).tolist()
    return Partition(tuple(order.split(counts)))


def space_to_message(space: RowSpace) -> Tensor:
    """A row space as a uint8 tensor: its rows, and the partitions in `lies`, which cannot be computed from the rows."""
    layouts = [[asdict(layout), [len(rows) for rows in dealt.shards]] for layout, dealt in space.lies.items()]
    header = json.dumps({"rows": len(space), "levels": space.levels, "layouts": layouts}).encode()
    header += b" " * (-len(header) % _SIZE)  # the numbers behind it are read in place
    arrays = [space.path.flatten(), *(getattr(space, name) for name in NUMBERS), space.dropped.long()]
    positions = [rows for dealt in space.lies.values() for rows in dealt.shards]
    body = torch.cat([torch.tensor([len(header)]), *arrays, *positions]).view(torch.uint8)
    return torch.cat([body[:_SIZE], to_message(header), body[_SIZE:]])


def space_from_message(message: Tensor) -> RowSpace:
    """The space that `space_to_message` wrote, without the seed, step and balance, which `RowSpace.at` gives it."""
    message = message.cpu()
    size = int(message[:_SIZE].clone().view(torch.int64))
    header = json.loads(from_message(message[_SIZE : _SIZE + size]))
    body = message[_SIZE + size :].clone().view(torch.int64)
    rows, levels = header["rows"], tuple(header["levels"])
    of_rows = [len(levels) * rows, *[rows] * len(NUMBERS), rows]
    path, lengths, tokens, versions, begins, dropped, positions = body.split([*of_rows, len(body) - sum(of_rows)])
    lies: dict[Layout, Partition] = {}
    for written, sizes in header["layouts"]:
        layout = Layout(**{**written, "ranks": tuple(written["ranks"])})
        lies[layout] = Partition(tuple(positions[: sum(sizes)].split(sizes)))
        positions = positions[sum(sizes) :]
    path = path.view(rows, len(levels))
    return RowSpace(levels[-1], path, lengths, tokens, versions, begins, dropped.bool(), lies, levels[:-1])
