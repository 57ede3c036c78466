"""What strategies of many ranks share: how the ranks meet, their groups, and sequences that ranks divide among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from rlflow.databuffer.transport import process_group
from rlflow.errors import UserError, about
from rlflow.models.attention import check_sequence_parallel
from rlflow.models.handle import ForwardPlan, ModelHandle
from rlflow.strategies.role import Role
from rlflow.strategies.sequence import divided_attention, peers_of
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.layout import Layout

if TYPE_CHECKING:
    from rlflow.strategies.processes import ManyProcesses

LONGEST_S = 1e9


class DistributedStrategy(TrainingStrategy):
    """Ranks that each have rows of their own. A subclass says what of a role is divided over its ranks."""

    precisions = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
    otherwise = "for fp64 use `strategy: single`"
    processes: ManyProcesses

    def _configure_ranks(
        self,
        precision: str,
        token_budget: int,
        packing: bool,
        float32_head: bool,
        timeout_s: float,
        within: int | None = None,
    ) -> None:
        if not 1 <= timeout_s <= LONGEST_S:
            raise UserError(f"`timeout_s` is {timeout_s}; give a number of seconds from 1 to {LONGEST_S:g}.")
        self.timeout = timedelta(seconds=timeout_s)
        from rlflow.strategies.processes import ManyProcesses  # Fabric's take a second of `rlflow fit --help`

        processes = ManyProcesses(self.timeout, self._before_joining)
        self._configure(processes, precision, token_budget, packing, float32_head)
        self._groups = Groups(self.timeout, within)

    def check_roles(self, handles: Mapping[str, ModelHandle], layouts: Mapping[str, Layout]) -> None:
        """See `TrainingStrategy.check_roles`."""
        for name in handles.keys() & layouts.keys():
            optimizer = handles[name].optimizer
            if self.stage and optimizer is not None:
                with about(optimizer):
                    optimizer.check_divides()

    def form_groups(self, layouts: Mapping[str, Layout]) -> None:
        """See `TrainingStrategy.form_groups`."""
        super().form_groups(layouts)
        for layout in layouts.values():
            self._groups.form(layout)

    def agree(self, name: str, count: int) -> int:
        """The largest `count` over the ranks of the role."""
        largest = torch.tensor(count)
        group = self._groups.of(self.layout(name)).all
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        return int(largest)

    def _before_joining(self) -> None:
        """Called in each rank before it joins the process group, when its device is known."""

    def _forward_plan(self, name: str) -> ForwardPlan:
        plan = super()._forward_plan(name)
        if self.layout(name).copies > 1:
            plan = replace(plan, peers=peers_of(self._groups.of(self.layout(name)).peers))
        if self.divides_weights:  # a forward pass gathers weights, so ranks make equally many
            plan = replace(plan, agree=lambda count: self.agree(name, count), gathers=True)
        return plan

    def _wrap(self, name: str, role: Role) -> nn.Module:
        """Let the peers of each shard divide its lines, if it has any: Ulysses around the packed attention."""
        layout = self.layout(name)
        if layout.copies > 1:
            check_sequence_parallel(role.model.model.config, layout.copies, name, self.packing)
            role.model.divided = divided_attention(self._groups.of(layout).peers)
        return role.model


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
        self._formed: set[Layout] = set()

    def form(self, layout: Layout) -> None:
        """Form what a layout needs; called by all ranks of the job, those outside the layout too."""
        self._formed.add(layout)
        peers = (layout.peers(shard) for shard in range(layout.shards))
        for ranks in (layout.ranks, *peers, *((rank,) for rank in layout.ranks), *self.divided_within(layout)):
            process_group(ranks, self._timeout)

    def divided_within(self, layout: Layout) -> list[tuple[int, ...]]:
        """The ranks of a layout, by those that divide weights once more among them; none where these are all."""
        size, ranks = self._within, layout.ranks
        return [] if size is None or len(ranks) <= size else _rows(ranks, size)

    def of(self, layout: Layout) -> RoleGroups:
        """The groups of a layout that this rank is in. One that was not formed yet is of all ranks, which all ask."""
        rank = dist.get_rank()
        if layout not in self._formed:
            assert len(layout.ranks) == dist.get_world_size(), layout
            self.form(layout)
        everybody, peers = self._own(layout.ranks), self._own(layout.peers(layout.shard(rank)))
        within = next((self._own(ranks) for ranks in self.divided_within(layout) if rank in ranks), None)
        return RoleGroups(everybody, peers, self._own((rank,)), within)

    def form_copies(self, layout: Layout, width: int) -> None:
        """Form what `copies` gives; called by all ranks of the job, those outside the layout too."""
        for ranks in _copies(layout.ranks, width):
            process_group(ranks, self._timeout)

    def copies(self, layout: Layout, width: int) -> tuple[ProcessGroup, ProcessGroup]:
        """Those with the same place as this rank in each `width` consecutive ranks, and the `width` that it is among.

        One that was not formed yet is of all ranks, which all ask.
        """
        assert layout in self._formed or len(layout.ranks) == dist.get_world_size(), layout
        self.form_copies(layout, width)  # where they are formed already, nothing happens
        across, among = (ranks for ranks in _copies(layout.ranks, width) if dist.get_rank() in ranks)
        return self._own(across), self._own(among)

    def _own(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """A group that was formed, and that this rank is in."""
        group = process_group(ranks, self._timeout)
        assert group is not None, ranks
        return group


def _copies(ranks: tuple[int, ...], width: int) -> list[tuple[int, ...]]:
    """Ranks in rows of `width`: first the columns, then the rows; none where they do not fill their rows."""
    rows = _rows(ranks, width)
    return [*zip(*rows, strict=True), *rows]


def _rows(ranks: tuple[int, ...], width: int) -> list[tuple[int, ...]]:
    """Consecutive ranks, `width` at a time; none where they do not fill their rows: an engine's, which hold no role."""
    if len(ranks) % width:
        return []
    return [ranks[start : start + width] for start in range(0, len(ranks), width)]


def replace_parameters(model: nn.Module, made_of: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Give a model other parameters; those that are tied stay so.

    Args:
        model: Changed in place.
        made_of: The new parameter for an old one.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                made[parameter] = made_of(parameter)
            setattr(module, key, made[parameter])
