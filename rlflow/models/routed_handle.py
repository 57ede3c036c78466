"""A handle whose model may be a mixture of experts: its routers frozen, balanced, or replayed from the rollout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.models.handle import ModelHandle
from rlflow.models.moe import MoE, Routed, Routing, load_balancing_loss, routers, watch_routers
from rlflow.models.packed import PackedModel
from rlflow.models.packing import ModelInput


class RoutedHandle(ModelHandle):
    """Watches the routers in its forward passes, where its settings ask for it."""

    def _train_routers(self, moe: MoE | None) -> None:
        """Called by the constructor, after the handle's own."""
        if moe is not None and not self.trainable:
            raise UserError(f"`moe` is given for {self.model!r}, which is frozen; set `trainable` or leave it out")
        self.moe = moe
        self._routed: list[tuple[Routing, ModelInput]] = []  # training forwards that nobody asked of

    @property
    def replays_routing(self) -> bool:
        """See `ModelHandle.replays_routing`."""
        return self.trainable and self.moe is not None and self.moe.routing_replay

    @contextmanager
    def training(self) -> Iterator[None]:
        """See `ModelHandle.training`."""
        self._routed.clear()
        with super().training():
            yield

    def take_routed(self) -> Routed:
        """See `ModelHandle.take_routed`."""
        if self.moe is None or not self._routed:
            return Routed()
        seen, self._routed = self._routed, []
        loss = None
        if self.moe.router_aux_loss_coef > 0:
            of_passes = [
                load_balancing_loss(routing.logits, routing.used, read.sequence_lengths()).sum()
                * (read.useful_tokens > 0)  # not of the token that stands for no rows
                for routing, read in seen
            ]
            loss = self.moe.router_aux_loss_coef * torch.stack(of_passes).sum()
        replayed = [routing for routing, _ in seen if routing.chosen is not None]
        otherwise = torch.stack([routing.otherwise() for routing in replayed]).sum() if replayed else 0
        return Routed(loss, otherwise, sum(routing.used[..., 0].numel() for routing in replayed))

    def _prepare(self, model: PackedModel) -> None:
        if self.moe is None:
            return
        if self.moe.freeze_router:
            for router in routers(model):
                router.requires_grad_(False)
        if self.moe.watches:
            watch_routers(model.model)

    def _forward_pass(self, read: ModelInput, *arguments: object) -> tuple[Tensor, ...]:
        if self.moe is None or not self.moe.watches:
            return super()._forward_pass(read, *arguments)
        assert self._forward is not None, "attach comes first"
        if self._training and self.moe.routing_replay and read.experts is None and read.useful_tokens > 0:
            raise UserError(
                f"`moe.routing_replay` is set for {self.model!r}, and the rows that it is trained on have no `experts`;"
                " train on a `Batch` or a `Rollout`, or leave the setting out"
            )
        model = next(module for module in self._forward.modules() if isinstance(module, PackedModel))
        model.routing = Routing(read.experts if self.moe.routing_replay else None)
        try:
            values = super()._forward_pass(read, *arguments)
        finally:
            routing, model.routing = model.routing, None
        if self._training:
            self._routed.append((routing, read))
        return values
