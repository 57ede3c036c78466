"""The process groups of roles: all ranks of each, and those that hold copies of the same rows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlflow.databuffer.transport import process_group
from rlflow.values.layout import Layout


@dataclass(frozen=True)
class RoleGroups:
    """The groups of one role that this rank is in; as DeepSpeed asks for them: all ranks divide the states of ZeRO.

    Attributes:
        all: The role's ranks.
        peers: The ranks that hold copies of this rank's rows.
        alone: This rank, as no layer is divided.
        within: The ranks that divide weights once more among them; None where none do.
    """

    all: ProcessGroup
    peers: ProcessGroup
    alone: ProcessGroup
    within: ProcessGroup | None = None

    def get_data_parallel_group(self) -> ProcessGroup:
        """All ranks."""
        return self.all

    def get_data_parallel_world_size(self) -> int:
        """How many they are."""
        return dist.get_world_size(self.all)

    def get_data_parallel_rank(self) -> int:
        """This rank's place among them."""
        return dist.get_rank(self.all)

    def get_model_parallel_group(self) -> ProcessGroup:
        """This rank alone."""
        return self.alone

    def get_model_parallel_world_size(self) -> int:
        """1."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """0."""
        return 0


class Groups:
    """Every group that the roles of this rank need.

    Args:
        timeout: After which a collective fails.
        within: How many ranks divide weights once more among them, where a role has more; None where none do.
    """

    def __init__(self, timeout: timedelta, within: int | None = None) -> None:
        self._timeout = timeout
        self._within = within
        self._formed: dict[tuple[int, ...], ProcessGroup | None] = {}

    def form(self, layout: Layout) -> None:
        """Form what a layout needs; called by all ranks of the job, those outside the layout too."""
        self._form(layout.ranks)
        for shard in range(layout.shards):
            self._form(layout.peers(shard))
        for rank in layout.ranks:
            self._form((rank,))
        for ranks in self.divided_within(layout):
            self._form(ranks)

    def divided_within(self, layout: Layout) -> list[tuple[int, ...]]:
        """The ranks of a layout, by those that divide weights once more among them; none where these are all."""
        size, ranks = self._within, layout.ranks
        return [] if size is None or len(ranks) <= size else _rows(ranks, size)

    def of(self, layout: Layout) -> RoleGroups:
        """The groups of a layout that this rank is in. One that was not formed yet is of all ranks, which all ask."""
        rank = dist.get_rank()
        if layout.ranks not in self._formed:
            assert len(layout.ranks) == dist.get_world_size(), layout
            self.form(layout)
        everybody = self._formed[layout.ranks]
        peers = self._formed[layout.peers(layout.shard(rank))]
        mine = self._formed[(rank,)]
        assert everybody is not None, layout
        assert peers is not None, layout
        assert mine is not None
        within = next((self._formed[ranks] for ranks in self.divided_within(layout) if rank in ranks), None)
        return RoleGroups(everybody, peers, mine, within)

    def form_copies(self, layout: Layout, width: int) -> None:
        """Form what `copies` gives; called by all ranks of the job, those outside the layout too."""
        for ranks in _copies(layout.ranks, width):
            self._form(ranks)

    def copies(self, layout: Layout, width: int) -> tuple[ProcessGroup, ProcessGroup]:
        """Those with the same place as this rank in each `width` consecutive ranks, and the `width` that it is among.

        One that was not formed yet is of all ranks, which all ask.
        """
        across, among = (ranks for ranks in _copies(layout.ranks, width) if dist.get_rank() in ranks)
        if across not in self._formed or among not in self._formed:
            assert len(layout.ranks) == dist.get_world_size(), layout
            self.form_copies(layout, width)
        same, divide = self._formed[across], self._formed[among]
        assert same is not None, layout
        assert divide is not None, layout
        return same, divide

    def _form(self, ranks: tuple[int, ...]) -> None:
        self._formed[ranks] = process_group(ranks, self._timeout)


def _copies(ranks: tuple[int, ...], width: int) -> list[tuple[int, ...]]:
    """Ranks in rows of `width`: first the columns, then the rows; none where they do not fill their rows."""
    rows = _rows(ranks, width)
    return [*zip(*rows, strict=True), *rows]


def _rows(ranks: tuple[int, ...], width: int) -> list[tuple[int, ...]]:
    """Consecutive ranks, `width` at a time; none where they do not fill their rows: an engine's, which hold no role."""
    if len(ranks) % width:
        return []
    return [ranks[start : start + width] for start in range(0, len(ranks), width)]
