"""What strategies of many ranks share: how the ranks meet, their groups, and sequences that ranks divide among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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

TIMEOUT_S = 600.0  # of a collective, where `timeout_s` does not say another one
LONGEST_S = 1e9


class DistributedStrategy(TrainingStrategy):
    """Ranks that each have rows of their own. A subclass says what of a role is divided over its ranks.

    Losses of all ranks add up to the loss of the update, so gradients are summed over ranks, never averaged. Ranks that
    hold copies of the same rows (`Layout.copies`) divide each sequence among them.

    Attributes:
        within_setting: The setting that says how many consecutive ranks of a role gather weights among them.
        sums_across: Whether ranks that hold the same parts of the weights sum gradients in a group of their own.
    """

    precisions = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
    otherwise = "for fp64 use `strategy: single`"
    within_setting: str
    sums_across = False
    processes: ManyProcesses

    def _configure_ranks(
        self,
        precision: str,
        token_budget: int,
        packing: bool,
        float32_head: bool,
        timeout_s: float,
        within: int | None,
    ) -> None:
        if not 1 <= timeout_s <= LONGEST_S:
            raise UserError(f"`timeout_s` is {timeout_s}; give a number of seconds from 1 to {LONGEST_S:g}.")
        self.timeout = timedelta(seconds=timeout_s)
        from rlflow.strategies.processes import ManyProcesses  # Fabric's take a second of `rlflow fit --help`

        processes = ManyProcesses(self.timeout, self._before_joining)
        self._configure(processes, precision, token_budget, packing, float32_head)
        self._within = within
        self._groups: dict[Layout, RoleGroups | None] = {}

    def check_roles(self, handles: Mapping[str, ModelHandle], layouts: Mapping[str, Layout]) -> None:
        """See `TrainingStrategy.check_roles`.

        Raises:
            UserError: An optimizer steps whole matrices, or a role's ranks are no multiple of those that gather.
        """
        for name in handles.keys() & layouts.keys():
            optimizer, ranks, within = handles[name].optimizer, layouts[name].ranks, self._gathers_within(layouts[name])
            if self.stage and optimizer is not None:
                with about(optimizer):
                    optimizer.check_divides()
            if len(ranks) % within:
                raise UserError(
                    f"`{self.within_setting}` is {within}, and `{name}` lives on {len(ranks)} ranks, which are no"
                    f" multiple of it; give a divisor of {len(ranks)}, or null"
                )

    def form_groups(self, layouts: Mapping[str, Layout]) -> None:
        """See `TrainingStrategy.form_groups`."""
        super().form_groups(layouts)
        for layout in layouts.values():
            self._groups[layout] = self._formed(layout)

    def agree(self, name: str, count: int) -> int:
        """The largest `count` over the ranks of the role."""
        largest = torch.tensor(count)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._groups_of(name).all)
        return int(largest)

    def _gathers_within(self, layout: Layout) -> int:
        """How many consecutive ranks of a role gather weights among them."""
        return len(layout.ranks) if self._within is None else min(self._within, len(layout.ranks))

    def _groups_of(self, name: str) -> RoleGroups:
        """The groups of a role of this rank. Those that `form_groups` was not asked for are of all ranks, which ask."""
        layout = self.layout(name)
        if layout not in self._groups:
            assert len(layout.ranks) == self.world_size, layout
            self._groups[layout] = self._formed(layout)
        groups = self._groups[layout]
        assert groups is not None, name
        return groups

    def _formed(self, layout: Layout) -> RoleGroups | None:
        """Form the groups of a layout, on all ranks of the job; None on those outside the layout."""

        def own(parts: Iterable[tuple[int, ...]]) -> ProcessGroup | None:
            groups = [process_group(ranks, self.timeout) for ranks in parts]
            return next((group for group in groups if group is not None), None)

        width = self._gathers_within(layout)
        rows = consecutive(layout.ranks, width) if width < len(layout.ranks) else []
        everybody, peers = own([layout.ranks]), own(consecutive(layout.ranks, layout.copies))
        alone, within = own(consecutive(layout.ranks, 1)), own(rows)
        across = own(zip(*rows, strict=True)) if self.sums_across else None
        if everybody is None or peers is None or alone is None:
            return None
        return RoleGroups(everybody, peers, alone, within, across)

    def _before_joining(self) -> None:
        """Called in each rank before it joins the process group, when its device is known."""

    def _forward_plan(self, name: str) -> ForwardPlan:
        plan = super()._forward_plan(name)
        if self.layout(name).copies > 1:
            plan = replace(plan, peers=peers_of(self._groups_of(name).peers))
        if self.divides_weights:  # a forward pass gathers weights, so ranks make equally many
            plan = replace(plan, agree=lambda count: self.agree(name, count), gathers=True)
        return plan

    def _wrap(self, name: str, role: Role) -> nn.Module:
        """Let the peers of each shard divide its lines, if it has any: Ulysses around the packed attention."""
        layout = self.layout(name)
        if layout.copies > 1:
            check_sequence_parallel(role.model.model.config, layout.copies, name, self.packing)
            role.model.divided = divided_attention(self._groups_of(name).peers)
        return role.model


@dataclass(frozen=True)
class RoleGroups:
    """The groups of one role that this rank is in.

    Of a role on ranks 0 to 7 that has two ranks to a sequence and divides weights within four, rank 5 has the peers 4
    and 5, `within` 4 to 7, and `across` 1 and 5.

    Attributes:
        all: The role's ranks.
        peers: The ranks that hold copies of this rank's rows.
        alone: This rank.
        within: The consecutive ranks that gather weights among them, where these are not all of the role's; else None.
        across: The ranks that hold the same parts of the weights as this one; None where `within` is, and for a
            strategy that does not use it.
    """

    all: ProcessGroup
    peers: ProcessGroup
    alone: ProcessGroup
    within: ProcessGroup | None
    across: ProcessGroup | None


def consecutive(ranks: tuple[int, ...], width: int) -> list[tuple[int, ...]]:
    """Ranks, `width` at a time; none where `width` does not divide them: those of an engine, which hold no role.

    Ranks 4 to 7 with a width of 2 are `[(4, 5), (6, 7)]`.
    """
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
