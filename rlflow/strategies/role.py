"""A role on a rank: its model, and what trains it (optimizer, schedule, loss scale, or the average that it is)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlflow.models.handle import ModelHandle
from rlflow.models.optimizer import Optimizer
from rlflow.models.packed import PackedModel
from rlflow.storage.tensors import TensorRange

FIRST = 2.0**14
LEAST = 1.0
LONG = 500  # updates without an overflow after which a larger factor is tried


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
        loss_scale: Scale of the losses of a trained role if its gradients are in float16; else None.
        average: The average, of a role that is another's moving average; `done` counts its moves then.
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

    @property
    def learning_rate(self) -> float:
        """The learning rate of the role's next update."""
        return scheduled(self.settings, self.step if self.settings.by == "steps" else self.done, self.updates)

    @property
    def kinds(self) -> list[str]:
        """Tensors of each weight's shape that the optimizer keeps, such as `exp_avg`; nothing before an update."""
        assert self.optimizer is not None
        kept: dict[str, object] = next(iter(self.optimizer.state.values()), {})
        return sorted(kind for kind, value in kept.items() if isinstance(value, Tensor) and value.dim() > 0)

    def clip_and_step(self, most: float = math.inf) -> float:
        """One update with the gradients in `.grad`, full or divided; returns their norm before clipping.

        Skipped if the norm is not finite, or above `most`.
        """
        from torch.distributed.tensor import DTensor  # takes half a second, which a command that trains nothing saves

        assert self.optimizer is not None
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if self.loss_scale is not None:
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.div_(self.scaled_by)
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        total = norm.item()
        limit = self.settings.gradient_clipping
        if is_taken(total, most):
            if 0.0 < limit < total:
                clip_grads_with_norm_(parameters, limit, norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return total


@dataclass
class LossScale:
    """The factor on a loss with gradients in float16: without it small gradients are 0, too large a factor overflows.

    A power of 2, halved by an update if its gradient overflowed and doubled after many that did not: Micikevicius et
    al., Mixed Precision Training, arXiv 1710.03740, section 3.2. It depends on the role's updates alone, and all its
    ranks see the same gradient.

    Attributes:
        factor: Factor on the loss; gradients are divided by it before they are clipped.
        clean: Updates since it last changed.
    """

    factor: float = FIRST
    clean: int = 0

    def update(self, finite: bool) -> None:
        """Adapt the factor after an update; if the gradient was not `finite`, the update was skipped."""
        if not finite:
            self.factor, self.clean = max(self.factor / 2, LEAST), 0
            return
        self.clean += 1
        if self.clean == LONG:
            self.factor, self.clean = self.factor * 2, 0

    @property
    def can_fall(self) -> bool:
        """Whether a smaller factor is left to be tried."""
        return self.factor > LEAST

    def record(self) -> tuple[float, int]:
        """What a checkpoint stores; `LossScale(*record)` resumes from it."""
        return self.factor, self.clean


@dataclass
class Average:
    """The moving average of another role's weights, in the parts that a rank holds.

    Attributes:
        owner: The role that it follows.
        decay: What stays of the average at a step.
        weights: The following model's own parameters by name, of those that the owner trains.
        parts: This rank's parts of the average, in float32, where the model's weights are narrower; else empty, and the
            weights are the average.
    """

    owner: str
    decay: float
    weights: dict[str, nn.Parameter]
    parts: dict[str, TensorRange] = field(default_factory=dict)

    def held(self, part_of: Callable[[nn.Parameter], TensorRange]) -> Iterator[tuple[str, TensorRange]]:
        """This rank's part of each averaged weight, by name."""
        for name, parameter in self.weights.items():
            yield name, self.parts[name] if self.parts else part_of(parameter)


def scheduled(settings: Optimizer, done: int, updates: int | None) -> float:
    """The learning rate after `done` updates or steps: a linear warm-up, then constant, or falling to 0 after all.

    With `lr: 1e-3` and `warmup_steps: 10` it is 1e-4, 2e-4, ... 1e-3 for the first ten updates.

    Args:
        settings: How the role is trained.
        done: How many updates, or steps, there were before this one.
        updates: How many there are in the whole run; only a schedule that falls needs it.
    """
    if done < settings.warmup_steps:
        return settings.lr * (done + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    assert updates is not None
    progress = (done - settings.warmup_steps) / max(1, updates - settings.warmup_steps)
    left = max(0.0, 1.0 - progress)
    return settings.lr * (left if settings.schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * left)))


def is_taken(norm: float, most: float) -> bool:
    """Whether an update of a gradient of this norm is made."""
    return math.isfinite(norm) and norm <= most


def begun(like: TensorRange, weights: TensorRange) -> TensorRange:
    """What an average starts as: a copy of the weights, in float32 or wider.

    Args:
        like: The range that this rank has of the owner's weights, and where it lies.
        weights: A range of the same parameter that holds that one.
    """
    first = like.start - weights.start
    values = weights.values[first : first + like.values.numel()]
    return TensorRange(
        like.start, values.to(like.values.device, torch.promote_types(values.dtype, torch.float32), copy=True)
    )


@torch.no_grad()
def move(average: TensorRange, weights: TensorRange, decay: float) -> None:
    """Set the average a to a + (1 - decay) (w - a); each number is rounded alone, so dividing changes no bit.

    Args:
        average: This rank's part of the average; changed in place.
        weights: The same range of the weights w that it follows.
        decay: What stays of the average, from 0 to 1; with 0.9 a tenth of the difference is added.
    """
    assert (average.start, len(average.values)) == (weights.start, len(weights.values))
    change: Tensor = weights.values.to(average.values) - average.values
    average.values.add_(change.mul_(1 - decay))
