"""The roles of a rank: their models, where each lives, and how its optimizer has moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlflow.models.handle import ModelHandle
from rlflow.models.optimizer import Optimizer
from rlflow.models.packed import PackedModel
from rlflow.strategies.average import Average
from rlflow.strategies.loss_scale import LossScale
from rlflow.values.layout import Layout

if TYPE_CHECKING:
    from rlflow.strategies.processes import ManyProcesses, OneProcess


@dataclass
class Role:
    """A loaded model and what trains it.

    Attributes:
        handle: What the algorithm calls.
        model: The weights, under DeepSpeed too.
        optimizer: Steps them; None for a frozen role.
        updates: How many updates the whole run makes, or steps if its schedule counts those; None where nobody knows.
        done: How many updates were made; skipped ones do not count.
        step: How many steps of the run trained it before this one.
        loss_scale: Of the losses of a trained role whose gradients are in float16; else None.
        average: Of a role that is another's moving average; `done` counts its moves then.
    """

    handle: ModelHandle
    model: PackedModel
    optimizer: torch.optim.Optimizer | None
    updates: int | None
    done: int = 0
    step: int = 0
    loss_scale: LossScale | None = None
    average: Average | None = None

    @property
    def scaled_by(self) -> float:
        """The factor on the role's losses, and on its gradients until they are applied."""
        return 1.0 if self.loss_scale is None else self.loss_scale.factor

    @property
    def settings(self) -> Optimizer:
        """How the role is trained; it is a trained one."""
        assert self.handle.optimizer is not None, self.handle.model
        return self.handle.optimizer


class RankRoles:
    """The roles of this rank by name, and the ranks on which each lives: on all of them, unless `form_groups` says."""

    processes: OneProcess | ManyProcesses  # Fabric's side: starts the ranks, and knows which this is
    _roles: dict[str, Role]
    _layouts: dict[str, Layout]

    @property
    def root_device(self) -> torch.device:
        """Of this rank."""
        return self.processes.root_device

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.processes.world_size

    @property
    def global_rank(self) -> int:
        """This rank, among all of the run."""
        return self.processes.global_rank

    @property
    def local_rank(self) -> int:
        """This rank, among those of this machine."""
        return self.processes.local_rank

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.processes.barrier()

    def form_groups(self, layouts: Mapping[str, Layout]) -> None:
        """Say where roles live; called once, before any role is set up, by all ranks of the job alike.

        Args:
            layouts: By role. The ranks that hold a shard's copies divide its sequences among them.
        """
        self._layouts = dict(layouts)

    def layout(self, name: str) -> Layout:
        """Where the role lives, loaded or not."""
        return self._layouts.get(name, Layout(tuple(range(self.world_size)), self.world_size))

    def divided_over(self, layout: Layout) -> int:
        """Over how many of a role's ranks it is divided; the others have copies."""
        return len(layout.ranks)

    def holds(self, name: str) -> bool:
        """Whether the role lives on this rank too."""
        return self.global_rank in self.layout(name).ranks

    def leads(self, name: str) -> bool:
        """Whether this is the role's first rank, which writes its files."""
        return self.global_rank == self.layout(name).ranks[0]

    def agree(self, name: str, count: int) -> int:
        """The largest `count` over the ranks of the role, such as their numbers of micro-batches."""
        return count

    def updates_done(self, name: str) -> int:
        """Updates that the role has made."""
        return self._roles[name].done

    def at_step(self, name: str, step: int) -> None:
        """Say how many steps of the run have trained the role, before each that does."""
        self._roles[name].step = step

    def loss_scale(self, name: str) -> LossScale | None:
        """Of the role, where its gradients are in float16."""
        return self._roles[name].loss_scale
