"""What strategies of many ranks share: how the ranks meet, their groups, and sequences that ranks divide among them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.utilities.distributed import _init_dist_connection
from torch import nn

from rlflow.databuffer.process_groups import connect_when_used
from rlflow.errors import UserError
from rlflow.models.attention import check_sequence_parallel
from rlflow.models.handle import ForwardPlan, ModelHandle
from rlflow.models.packed import PackedModel
from rlflow.strategies.groups import Groups
from rlflow.strategies.launcher import RankLauncher
from rlflow.strategies.sequence import divided_attention, peers_of
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.layout import Layout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DistributedStrategy(TrainingStrategy, DDPStrategy):
    """Ranks that each have rows of their own. Fabric starts them and says which rank this is; no more of it is used.

    A subclass says what of a role is divided over its ranks.
    """

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
        if timeout_s <= 0:
            raise UserError(f"`timeout_s` is {timeout_s}; it is a number of seconds above 0.")
        self._configure(DTYPES[precision], token_budget, packing, float32_head)
        self.timeout = timedelta(seconds=timeout_s)
        self._groups = Groups(self.timeout, within)
        DDPStrategy.__init__(self)

    def check_roles(self, handles: Mapping[str, ModelHandle], layouts: Mapping[str, Layout]) -> None:
        """See `TrainingStrategy.check_roles`."""
        for name in handles.keys() & layouts.keys():
            optimizer = handles[name].optimizer
            if self.stage and optimizer is not None:
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

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; on a GPU it is named, for the process group is bound to none."""
        torch.distributed.barrier(device_ids=self._determine_ddp_device_ids())

    def _setup_distributed(self) -> None:
        for announcer in ("lightning.fabric", "lightning.pytorch"):  # of every rank, on the terminal
            logging.getLogger(announcer).setLevel(logging.WARNING)
        # Without a `device_id`, unlike Fabric: bound to a device, torch would split each further group from that of all
        # ranks while it is formed, at once and by NCCL, thousands of them in a large job.
        self._set_world_ranks()
        assert self.cluster_environment is not None
        backend = "gloo"
        if self.root_device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"
            connect_when_used()
        _init_dist_connection(self.cluster_environment, backend, timeout=self.timeout)
        self._process_group_backend = backend
        # DeepSpeed and vLLM read them, however the ranks were started.
        os.environ |= {
            "MASTER_ADDR": self.cluster_environment.main_address,
            "MASTER_PORT": str(self.cluster_environment.main_port),
            "RANK": str(self.global_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
        }

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

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
