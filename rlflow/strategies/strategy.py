"""What the controller asks of a strategy: load roles, run backward and step, hand out weights."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlflow.errors import UserError
from rlflow.models.causal_lm import Averaged, WithoutAdapters
from rlflow.models.filling import WeightFilling
from rlflow.models.handle import ForwardPlan, ModelHandle
from rlflow.models.lora import digest_of
from rlflow.models.packed import PackedModel
from rlflow.strategies.held_weights import SAVE_BUCKET_BYTES
from rlflow.strategies.loss_scale import LossScale
from rlflow.strategies.roles import Role
from rlflow.strategies.training_state import TrainingState
from rlflow.strategies.update import is_taken, scheduled
from rlflow.values.layout import Layout

if TYPE_CHECKING:
    from rlflow.strategies.processes import ManyProcesses, OneProcess


class TrainingStrategy(TrainingState):
    """Trains the roles of this rank; `Fabric(strategy=...)` is given its `processes`.

    A subclass says how a role is wrapped (`_wrap`), how gradients come about (`backward`) and how they are applied
    (`_update`); one that `divides_weights` also what a rank holds of each (`_materialize`, `_part_of`). A method that
    takes a role's name is called by all ranks of the role and by no others, in the same order. A role is on all ranks,
    each with rows of its own, unless `form_groups` says otherwise.
    """

    token_budget: int
    packing: bool
    float32_head: bool
    timeout: timedelta | None = None  # of collectives
    stage: int | None = None  # of ZeRO, or the one that divides as much; sums in float32; None where nothing is divided
    can_offload: bool = False  # whether `offload_optimizer` is a setting
    offload_optimizer: bool = False  # to the CPU's memory
    divides_weights: bool = False  # no rank ever holds a whole model
    offload_parameters: bool = False  # weights too
    bucket_elements: int = 0  # gradients that are reduced at once, at most, from ZeRO 1 on
    live_elements: int | None = None  # weights that are whole at a time, at most, at ZeRO 3; None for a layer's
    partition_within: int | None = None  # ranks that divide weights once more among them, at ZeRO 3

    def _configure(
        self,
        processes: OneProcess | ManyProcesses,
        dtype: torch.dtype,
        token_budget: int,
        packing: bool,
        float32_head: bool = False,
    ) -> None:
        if token_budget < 1:
            raise UserError(f"`token_budget` is {token_budget}; a micro-batch holds at least 1 token.")
        self.processes = processes
        self.dtype = dtype
        self.token_budget = token_budget
        self.packing = packing
        self.float32_head = float32_head
        self._roles: dict[str, Role] = {}
        self._layouts: dict[str, Layout] = {}

    def check_roles(self, handles: Mapping[str, ModelHandle], layouts: Mapping[str, Layout]) -> None:
        """Refuse what cannot be trained this way, before processes start.

        Args:
            handles: By role.
            layouts: Where each role lives; there may be others.

        Raises:
            UserError: Something cannot.
        """

    def setup_role(self, name: str, handle: ModelHandle, path: Path, updates: int | None = None) -> None:
        """Load a model, wrap it, give it an optimizer if it is trained, and attach it to its handle.

        A view loads nothing: its owner's role was set up before.

        Args:
            name: The role.
            handle: What the algorithm calls.
            path: A folder in Hugging Face form.
            updates: Updates in the whole run, for schedules that end.

        Raises:
            UserError: The schedule needs `updates` and there are none, or the model cannot be loaded or scored rightly.
        """
        if isinstance(handle, WithoutAdapters):
            handle.attach_to_owner()
            return
        settings = handle.optimizer
        if settings is not None and settings.schedule != "constant" and updates is None:
            raise UserError(
                f"`{name}` has the schedule `{settings.schedule}`, which ends with the run, and nobody knows how many "
                "updates this run makes. Set `trainer.max_steps`, or the schedule `constant`."
            )
        model = handle.load(path, self.dtype, self.root_device, empty=self.divides_weights)
        if self.divides_weights:
            filling = WeightFilling(model)
            self._materialize(name, model)
            filling.fill(self._part_of, self.root_device)
        trained = [weight.parameter for weight in model.trained()]
        optimizer = settings.kind(trained, **settings.keywords) if settings is not None else None
        if self.float32_head:
            model.use_float32_head()
        scale = LossScale() if optimizer is not None and self.dtype == torch.float16 else None
        role = self._roles[name] = Role(handle, model, optimizer, updates, loss_scale=scale)
        forward, plan = self._wrap(name, role), self._forward_plan(name)
        model.check(forward, self.root_device, plan.peers)
        if handle.lora is not None:
            buckets = self._full(model.own_weights(), SAVE_BUCKET_BYTES)
            model.base_digest = digest_of(each for bucket in buckets for each in bucket)
        handle.attach(forward, plan)
        if isinstance(handle, Averaged) and handle.owner.trainable:
            role.average = self._average_of(role, handle)

    def step(self, name: str, most: float = math.inf) -> float:
        """Clip, update the weights, move the learning rate, forget the gradients.

        Args:
            name: The role.
            most: The largest norm of a gradient that is taken.

        Returns:
            The norm of the whole gradient before clipping, the same on every rank of the role. If it is not finite or
            above `most`, no rank has changed anything.
        """
        role = self._roles[name]
        assert role.optimizer is not None, name
        for group in role.optimizer.param_groups:
            group["lr"] = self.learning_rate(name)
        norm = self._update(name, role, most)
        if is_taken(norm, most):
            role.done += 1
        if role.loss_scale is not None:
            role.loss_scale.update(math.isfinite(norm))
        return norm

    def learning_rate(self, name: str) -> float:
        """The learning rate of the role's next update."""
        role = self._roles[name]
        return scheduled(role.settings, role.step if role.settings.by == "steps" else role.done, role.updates)

    def _materialize(self, name: str, model: PackedModel) -> None:
        """Give each parameter, which is on the device `meta`, memory for this rank's part of it.

        Tied parameters stay tied. Buffers may be made anew, for they are set afterwards. Only called where weights are
        divided, by all ranks of the role.
        """
        raise NotImplementedError

    @abstractmethod
    def _wrap(self, name: str, role: Role) -> torch.nn.Module:
        """What the handle calls for a forward pass."""

    def _forward_plan(self, name: str) -> ForwardPlan:
        return ForwardPlan(self.token_budget, self.packing)
