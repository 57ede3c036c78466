"""The common base of strategies of many ranks: their start, process groups, and sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from rlflow.databuffer.transport import process_group
from rlflow.errors import UserError, about
from rlflow.models.attention import check_sequence_parallel, use_flash_attention_3
from rlflow.models.handle import ForwardPlan, ModelHandle
from rlflow.strategies.role import Role
from rlflow.strategies.sequence import divided_attention, peers_of
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.layout import Layout

if TYPE_CHECKING:
    from rlflow.strategies.processes import ManyProcesses

TIMEOUT_S = 600.0  # seconds for a collective, by default
LONGEST_S = 1e9  # largest `timeout_s`


class DistributedStrategy(TrainingStrategy):
    """Data-parallel training on many ranks. A subclass decides how a role's weights and states are divided.

    Losses of all ranks add up to the loss of the update, so gradients are summed over ranks, never averaged. Ranks that
    hold copies of the same rows (`Layout.copies`) divide each layer or each sequence among them.

    A subclass sets `stage`, `divides_weights` and `within_setting`, calls `_configure_ranks` in its constructor, and
    implements `_materialize` where it divides weights.

    Attributes:
        within_setting: Name of the setting for the number of consecutive ranks that gather weights from one another:
            `hpz_partition_size` of DeepSpeed, `hsdp_shard_size` of FSDP.
        sums_across: Whether ranks that hold the same parts of the weights sum gradients in a group of their own.
    """

    precisions = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
    otherwise = "for fp64 use `strategy: single`"
    within_setting: str
    sums_across = False
    _flash_attention: Literal[2, 3] = 2
    processes: ManyProcesses

    def _configure_ranks(
        self,
        precision: str,
        forward_plan: ForwardPlan,
        float32_head: bool,
        timeout_s: float,
        within: int | None,
    ) -> None:
        """Check and store the settings that these strategies share; called by each subclass's constructor."""
        if not 1 <= timeout_s <= LONGEST_S:
            raise UserError(f"`timeout_s` is {timeout_s}; give a number of seconds from 1 to {LONGEST_S:g}.")
        self.timeout = timedelta(seconds=timeout_s)
        from rlflow.strategies.processes import ManyProcesses  # importing Fabric's would slow `rlflow fit --help`

        processes = ManyProcesses(self.timeout, self._before_joining)
        self._configure(processes, precision, forward_plan, float32_head)
        self._within = within
        self._groups: dict[Layout, RoleGroups | None] = {}

    def check_roles(self, handles: Mapping[str, ModelHandle], layouts: Mapping[str, Layout]) -> None:
        """See `TrainingStrategy.check_roles`.

        Raises:
            UserError: Ranks divide layers, and this strategy cannot; states are divided and an optimizer needs whole
                matrices; or the number of a role's ranks is not a multiple of the setting `within_setting`.
        """
        for name in handles.keys() & layouts.keys():
            optimizer, ranks, within = handles[name].optimizer, layouts[name].ranks, self._gathers_within(layouts[name])
            for setting in () if self.divides_layers else ("tensor_parallel_size", "expert_parallel_size"):
                if (size := getattr(layouts[name], setting)) > 1:
                    raise UserError(
                        f"`placement.{name}.{setting}` is {size}, and {type(self).__name__} computes with whole layers;"
                        " use `strategy: fsdp`, or set it to 1"
                    )
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
        """The largest `count` over the ranks of the role; an all-reduce that each of them joins.

        Ranks that have 3 and 5 micro-batches both get 5, so that they make equally many forward passes.
        """
        largest = torch.tensor(count)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._groups_of(name).all)
        return int(largest)

    def _gathers_within(self, layout: Layout) -> int:
        """Number of consecutive ranks of a role that gather weights from one another."""
        return len(layout.ranks) if self._within is None else min(self._within, len(layout.ranks))

    def _groups_of(self, name: str) -> RoleGroups:
        """The process groups of a role that is on this rank.

        If `form_groups` was not called, they are formed at the first call; all ranks of the job must then make it.
        """
        layout = self.layout(name)
        if layout not in self._groups:
            assert len(layout.ranks) == self.world_size, layout
            self._groups[layout] = self._formed(layout)
        groups = self._groups[layout]
        assert groups is not None, name
        return groups

    def _formed(self, layout: Layout) -> RoleGroups | None:
        """Form the process groups of a layout; called by all ranks of the job in the same order. None outside it."""

        def own(parts: Iterable[tuple[int, ...]]) -> ProcessGroup | None:
            groups = [process_group(ranks, self.timeout) for ranks in parts]
            return next((group for group in groups if group is not None), None)

        width = self._gathers_within(layout)
        rows = consecutive(layout.ranks, width) if width < len(layout.ranks) else []
        size = layout.tensor_parallel_size
        sequences = [peers[n::size] for peers in consecutive(layout.ranks, layout.copies) for n in range(size)]
        everybody, peers = own([layout.ranks]), own(sequences)
        alone, within = own(consecutive(layout.ranks, 1)), own(rows)
        across = own(zip(*rows, strict=True)) if self.sums_across else None
        layers = consecutive(layout.ranks, size) if size > 1 else []
        layer, columns = own(layers), own(zip(*layers, strict=True))
        several = layout.expert_parallel_size > 1
        divided = consecutive(layout.ranks, layout.expert_parallel_size) if several else []
        experts, same_experts = own(divided), own(zip(*divided, strict=True))
        if everybody is None or peers is None or alone is None:
            return None
        return RoleGroups(
            everybody, peers, alone, within if layer is None else columns, across, layer, experts, same_experts
        )

    def _before_joining(self) -> None:
        """Called in each rank before it joins the process group, when its device is known."""
        if self._flash_attention == 3:
            use_flash_attention_3(self.root_device)

    def _plan_of(self, name: str) -> ForwardPlan:
        plan = super()._plan_of(name)
        if self.layout(name).sequence_parallel_size > 1:
            plan = replace(plan, peers=peers_of(self._groups_of(name).peers))
        if self.divides_weights:  # a forward pass gathers weights, so all ranks must make the same number of passes
            plan = replace(plan, agree=lambda count: self.agree(name, count), gathers=True)
        return plan

    def _wrap(self, name: str, role: Role) -> nn.Module:
        """The model, with Ulysses sequence parallelism around its attention where a shard has several peers."""
        layout = self.layout(name)
        layers, sequences = layout.tensor_parallel_size, layout.sequence_parallel_size
        if sequences > 1:
            check_sequence_parallel(role.model.model.config, sequences, name, self.forward_plan.packing, layers)
            role.model.divided = divided_attention(self._groups_of(name).peers)
        return role.model


@dataclass(frozen=True)
class RoleGroups:
    """The process groups of one role that this rank belongs to.

    For example, a role on ranks 0 to 7 divides each sequence over 2 ranks, and its weights over 4. Rank 5 has:

        all     (0, 1, 2, 3, 4, 5, 6, 7)
        peers   (4, 5)
        alone   (5,)
        within  (4, 5, 6, 7)
        across  (1, 5)

    Attributes:
        all: The role's ranks.
        peers: The ranks that divide the sequences of this rank's rows among them; includes this rank.
        alone: This rank alone.
        within: The ranks that gather weights from one another; None if these are all ranks of the role. Consecutive
            ranks, unless ranks divide layers: then those that hold parts of the same part of each layer.
        across: The ranks that hold the same parts of the weights as this rank; None if `within` is None, and for a
            strategy that does not use it.
        layer: The consecutive ranks that divide each layer, and compute with their parts; None if none do.
        experts: The consecutive ranks that divide the experts of each layer; None if none do.
        same_experts: The ranks that hold parts of the same experts as this rank; None if `experts` is None.
    """

    all: ProcessGroup
    peers: ProcessGroup
    alone: ProcessGroup
    within: ProcessGroup | None
    across: ProcessGroup | None
    layer: ProcessGroup | None = None
    experts: ProcessGroup | None = None
    same_experts: ProcessGroup | None = None


def consecutive(ranks: tuple[int, ...], width: int) -> list[tuple[int, ...]]:
    """The ranks in groups of `width`: ranks 4 to 7 with a width of 2 are `[(4, 5), (6, 7)]`.

    Empty if `width` does not divide their number, which happens only for ranks of an engine that hold no role.
    """
    if len(ranks) % width:
        return []
    return [ranks[start : start + width] for start in range(0, len(ranks), width)]


def replace_parameters(model: nn.Module, made_of: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter of a model by a new one; tied parameters stay tied.

    Args:
        model: The model, changed in place.
        made_of: Returns the new parameter for an old one; called once for each, however often it is tied.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                made[parameter] = made_of(parameter)
            setattr(module, key, made[parameter])
