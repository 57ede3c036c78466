"""What belongs to rows and not to values: who they are, how long they are, and where they lie."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from rlflow.databuffer.balance import AUTO, Balance, Predicted, deal, group_partition, grouped
from rlflow.databuffer.partition import Partition
from rlflow.databuffer.route import Route
from rlflow.databuffer.transport import Transport
from rlflow.values.layout import Layout

ARRAYS = ("ids", "groups", "lengths", "tokens", "versions")  # of a row space, in the order in which they are gathered


@dataclass(frozen=True, eq=False)
class RowSpace:
    """The rows of one step, the same object on every rank: prompts, or the samples that a rollout node made of them.

    All arrays are int64, on the CPU, by ascending id.

    Attributes:
        name: Of the rows: "batch", or the rollout node's.
        ids: `[N]`, distinct over the whole run.
        groups: `[N]`, the id of the prompt that a row answers; of a prompt, its own.
        lengths: `[N]`, response tokens: where `PerToken` columns are cut.
        tokens: `[N]`, prompt and response tokens: what a row costs in a forward pass.
        versions: `[N]`, of the policy that generated the row; -1 where none did.
        home: The layout in which the rows were made, and their partition there.
        seed: Of the run; with `step` it decides which rows share a mini-batch.
        step: Of the run, from 0.
        balance: Whether rows move to even out their cost.
        dealt: How the rows lie in layouts where that cannot be worked out; see `known`.
    """

    name: str
    ids: Tensor
    groups: Tensor
    lengths: Tensor
    tokens: Tensor
    versions: Tensor
    home: tuple[Layout, Partition]
    seed: int = 0
    step: int = 0
    balance: Balance = AUTO
    dealt: dict[Layout, Partition] = field(default_factory=dict, init=False, repr=False)
    _partitions: dict[Layout, Partition] = field(default_factory=dict, init=False, repr=False)
    _predicted: dict[Layout, Predicted] = field(default_factory=dict, init=False, repr=False)
    _routes: dict[tuple[int, Layout, Layout, RowSpace], Route] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def gather(
        cls,
        name: str,
        transport: Transport,
        layout: Layout,
        *,
        ids: Tensor,
        groups: Tensor,
        lengths: Tensor,
        tokens: Tensor,
        versions: Tensor | None = None,
        seed: int = 0,
        step: int = 0,
        balance: Balance = AUTO,
    ) -> RowSpace:
        """Tell the ranks of `layout` of the rows that its shards hold. A collective of these ranks.

        The arrays are those of this rank's shard, in its order. Of several peers only the publisher's count.
        """
        versions = torch.full_like(ids, -1) if versions is None else versions
        arrays = torch.stack([array.to("cpu", torch.int64) for array in (ids, groups, lengths, tokens, versions)])
        gathered = transport.all_gather_ragged(arrays.flatten(), layout.ranks)
        shards = [of_rank.view(len(arrays), -1) for of_rank in gathered[:: layout.copies]]
        return cls.of_shards(name, layout, shards, seed=seed, step=step, balance=balance)

    @classmethod
    def of_shards(
        cls,
        name: str,
        layout: Layout,
        shards: Sequence[Tensor],
        *,
        seed: int = 0,
        step: int = 0,
        balance: Balance = AUTO,
    ) -> RowSpace:
        """The space of rows that all ranks know already.

        Args:
            name: Of the rows.
            layout: Where they were made.
            shards: For each shard of `layout` `[5, n]` int64: ids, groups, lengths, tokens, versions of its rows.
            seed: Of the run.
            step: Of the run.
            balance: Whether rows move to even out their cost.
        """
        rows = torch.cat(list(shards), dim=1)  # [5, N]
        by_id = torch.argsort(rows[0])
        ids, groups, lengths, tokens, versions = rows[:, by_id]
        assert bool((ids[1:] > ids[:-1]).all()), f"two rows of `{name}` have one id"
        position = torch.empty_like(by_id)
        position[by_id] = torch.arange(len(by_id))
        home = (layout, Partition(position.split([shard.shape[1] for shard in shards])))
        return cls(name, ids, groups, lengths, tokens, versions, home, seed, step, balance)

    def __len__(self) -> int:
        return int(self.ids.numel())

    def partition(self, layout: Layout) -> Partition:
        """Where the rows lie in `layout`; computed once, by all ranks alike."""
        if layout not in self._partitions:
            self._partitions[layout] = self._deal(layout)
        return self._partitions[layout]

    def held(self, layout: Layout, rank: int) -> Tensor:
        """Positions of the rows that `rank` holds in `layout`, in its order; none where it is not one of its ranks."""
        if rank not in layout.ranks:
            return torch.empty(0, dtype=torch.int64)
        return self.partition(layout).shards[layout.shard(rank)]

    def route(self, rank: int, source: Layout, target: Layout, reader: RowSpace) -> Route:
        """How these rows come from `source` to `target`, seen from `rank`; computed once.

        Args:
            rank: A rank of either layout.
            source: Where they were made.
            target: Where they are read.
            reader: The rows beside which they are read: these themselves, or samples of the prompts that these are.
        """
        key = (rank, source, target, reader)
        if key not in self._routes:
            made, read = self.partition(source), reader.partition(target)
            position = None if reader is self else self._prompts_of(reader)
            self._routes[key] = Route.find(rank, source, target, made, read, position)
        return self._routes[key]

    def in_order(self, layout: Layout, of_ranks: Sequence[Tensor]) -> Tensor:
        """The entries `[N]` of all rows, by ascending id, from those `[B]` that each of the layout's ranks holds."""
        ordered = torch.empty(len(self), dtype=of_ranks[0].dtype, device=of_ranks[0].device)
        for positions, of_rank in zip(self.partition(layout).shards, of_ranks[:: layout.copies], strict=True):
            ordered[positions] = of_rank
        return ordered

    def gathered(self, layout: Layout, here: Tensor, transport: Transport, members: tuple[int, ...]) -> Tensor:
        """The entries `[N]` of all rows, by ascending id, on all `members`; a collective of theirs.

        Args:
            layout: Where the entries are; all its ranks are members.
            here: `[B]`, this rank's; `[0]` where it is not in the layout.
            transport: To them.
            members: Ranks that want to know.
        """
        of_members = transport.all_gather_ragged(here, members)
        return self.in_order(layout, [of_members[members.index(rank)] for rank in layout.ranks])

    def of_groups(self, groups: Tensor, layouts: Iterable[Layout]) -> RowSpace:
        """The rows of these groups, where they lie now in `layouts`, of which one is that of their home."""
        kept = torch.isin(self.groups, groups)
        position = kept.cumsum(0) - 1  # [N], in the new space
        dealt = {
            layout: Partition(tuple(position[rows[kept[rows]]] for rows in self.partition(layout).shards))
            for layout in layouts
        }
        return self.renewed({name: getattr(self, name)[kept] for name in ARRAYS}, dealt)

    @classmethod
    def joined(cls, parts: Sequence[RowSpace], layouts: Iterable[Layout]) -> RowSpace:
        """The rows of all parts, where they lie in `layouts`: in a shard those of earlier parts first.

        Home, as one of these, and step are those of the last part.
        """
        order = ids_in_order(parts)
        arrays = {name: torch.cat([getattr(part, name) for part in parts])[order] for name in ARRAYS}
        position = order.argsort()  # of each row of the parts, one after the other
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
        return parts[-1].renewed(arrays, dealt)

    def at(self, *, seed: int, step: int, balance: Balance) -> RowSpace:
        """These rows where they lie, as rows of this step, though an earlier one or an earlier run made them."""
        arrays = {name: getattr(self, name) for name in ARRAYS}
        known = {self.home[0]: self.home[1]} | self.dealt
        return RowSpace.known(self.name, arrays, self.home, known, seed=seed, step=step, balance=balance)

    def renewed(self, arrays: dict[str, Tensor], dealt: dict[Layout, Partition]) -> RowSpace:
        """Other rows of this name and step, of which it is known how they lie in some layouts, home among them."""
        home = (self.home[0], dealt[self.home[0]])
        return RowSpace.known(self.name, arrays, home, dealt, seed=self.seed, step=self.step, balance=self.balance)

    @classmethod
    def known(
        cls,
        name: str,
        arrays: Mapping[str, Tensor],
        home: tuple[Layout, Partition],
        dealt: Mapping[Layout, Partition],
        *,
        seed: int,
        step: int,
        balance: Balance,
    ) -> RowSpace:
        """Rows of which it is known how they lie in some layouts, as those are that a filter kept."""
        space = cls(name=name, **arrays, home=home, seed=seed, step=step, balance=balance)
        space.dealt.update(dealt)
        space._partitions.update(dealt)
        return space

    @property
    def predicted(self) -> Predicted:
        """What moving rows was predicted to save and to take, of all layouts dealt so far where they could stay."""
        return sum(self._predicted.values(), Predicted())

    def mini_batches(self, samples_per_update: int | None) -> list[Tensor]:
        """Positions of the rows of each mini-batch, ascending: a function of seed, step and ids, never of ranks.

        Args:
            samples_per_update: Rows of a mini-batch; the last has what is left. None for one mini-batch of all.
        """
        update, count = self._updates(samples_per_update)
        return list(grouped(update, count))

    def held_mini_batches(self, layout: Layout, rank: int) -> list[Tensor]:
        """For each mini-batch of `layout`, which of the rows that `rank` holds belong to it: indices into its rows."""
        update, count = self._updates(layout.samples_per_update)
        return list(grouped(update[self.held(layout, rank)], count))

    def _updates(self, samples_per_update: int | None) -> tuple[Tensor, int]:
        """For each row `[N]` the number of its mini-batch, and how many there are."""
        update = torch.zeros_like(self.ids)
        if samples_per_update is None:
            return update, 1
        key = hashlib.blake2b(f"{self.seed}/{self.step}/{self.name}".encode(), digest_size=7).digest()
        shuffled = torch.randperm(len(self), generator=torch.Generator().manual_seed(int.from_bytes(key, "big")))
        update[shuffled] = torch.arange(len(self)) // samples_per_update
        return update, max(1, -(-len(self) // samples_per_update))

    def _prompts_of(self, reader: RowSpace) -> Tensor:
        """For each row of `reader` the position here of the prompt that it answers."""
        positions = torch.searchsorted(self.ids, reader.groups).clamp_(max=max(len(self) - 1, 0))
        assert torch.equal(self.ids[positions], reader.groups), f"`{reader.name}` answers prompts {self.name} has not"
        return positions

    def _deal(self, layout: Layout) -> Partition:
        made_in, at_home = self.home
        if layout == made_in:
            return at_home
        can_stay = layout.shards == made_in.shards
        if layout.dealing == "groups":
            if can_stay and made_in.dealing == "groups":
                return at_home
            if layout.ranks == made_in.ranks and layout.shards % made_in.shards == 0:
                return self._shared_out(at_home, layout.shards // made_in.shards)
            return Partition(group_partition(self.groups, layout.shards))
        if can_stay and self.balance.mode == "off":
            return at_home
        update, updates = self._updates(layout.samples_per_update)
        costs = self.balance.costs(self.tokens)
        shard = torch.empty_like(self.ids)
        for rows in grouped(update, updates):
            shard[rows] = deal(costs[rows], layout.shards)
        if can_stay:
            here, travels = at_home.places[0].long(), _travels(made_in, layout)
            self._predicted[layout] = self.balance.predict(self.tokens, update, here, shard, travels)
            if not self._predicted[layout].pays:
                return at_home
        made = torch.cat(at_home.shards)  # in a shard rows from one rank follow one another, as that rank holds them
        return Partition(tuple(made[held] for held in grouped(shard[made], layout.shards)))

    def _shared_out(self, at_home: Partition, among: int) -> Partition:
        """The groups of each shard dealt among its own ranks, so that none needs what another shard made."""
        shares = [(rows, group_partition(self.groups[rows], among)) for rows in at_home.shards]
        return Partition(tuple(rows[share] for rows, dealt in shares for share in dealt))


def ids_in_order(parts: Sequence[RowSpace]) -> Tensor:
    """`[N]`, which of the rows of all parts, one after the other, come first by id."""
    ids = torch.cat([part.ids for part in parts])
    order: Tensor = ids.argsort()
    assert bool((ids[order].diff() > 0).all()), f"two rows of `{parts[0].name}` have one id"
    return order


def _travels(here: Layout, there: Layout) -> Tensor:
    """For each shard `[S]` of layouts of as many shards, whether some ranks get its rows from others if none moves."""
    return torch.tensor([not {*there.peers(s)} <= {*here.peers(s)} for s in range(there.shards)])
