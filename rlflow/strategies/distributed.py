"""What strategies of many ranks share: how the ranks meet, their groups, and sequences that ranks divide among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import nn

from rlflow.errors import UserError, about
from rlflow.models.attention import check_sequence_parallel
from rlflow.models.handle import ForwardPlan, ModelHandle
from rlflow.models.packed import PackedModel
from rlflow.strategies.groups import Groups
from rlflow.strategies.sequence import divided_attention, peers_of
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.layout import Layout

if TYPE_CHECKING:
    from rlflow.strategies.processes import ManyProcesses

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LONGEST_S = 1e9


class DistributedStrategy(TrainingStrategy):
    """Ranks that each have rows of their own. A subclass says what of a role is divided over its ranks."""

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
        if precision not in DTYPES:
            raise UserError(
                f"`precision` is {precision!r}; {type(self).__name__} trains in fp32, bf16 or fp16 (fp64:"
                " SingleProcess)."
            )
        if not 1 <= timeout_s <= LONGEST_S:
            raise UserError(f"`timeout_s` is {timeout_s}; give a number of seconds from 1 to {LONGEST_S:g}.")
        self.timeout = timedelta(seconds=timeout_s)
        from rlflow.strategies.processes import ManyProcesses  # Fabric's take a second of `rlflow fit --help`

        processes = ManyProcesses(self.timeout, self._before_joining)
        self._configure(processes, DTYPES[precision], token_budget, packing, float32_head)
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
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
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

    def _divide(self, name: str, model: PackedModel) -> None:
        """Let the peers of each shard divide its lines, if it has any: Ulysses around the packed attention."""
        layout = self.layout(name)
        if layout.copies == 1:
            return
        check_sequence_parallel(model.model.config, layout.copies, name, self.packing)
        model.divide(divided_attention(self._groups.of(layout).peers))


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
