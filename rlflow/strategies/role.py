"""A role on a rank: its model, and its optimizer, schedule and loss scale, or its moving average."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlflow.models.handle import ModelHandle
from rlflow.models.optimizer import GroupedOptimizer, Optimizer
from rlflow.models.packed import PackedModel
from rlflow.storage.safetensors_files import TensorRange

FIRST = 2.0**14  # the loss scale at the start
LEAST = 1.0  # the smallest loss scale
LONG = 500  # updates without an overflow after which a larger factor is tried


@dataclass
class Role:
    """A loaded model, and the state of its training.

    Attributes:
        handle: The handle that the algorithm calls.
        model: The model with its weights, also where DeepSpeed wraps it.
        optimizer: Optimizer of the weights; None for a frozen role.
        updates: Number of updates in the whole run, or of steps if the schedule counts steps; None if it is not known.
        done: Number of updates made so far; skipped ones do not count.
        step: Number of steps of the run that trained the role before this one.
        loss_scale: Scale of the losses of a trained role if its gradients are in float16; else None.
        average: The average, if the role is a moving average of another; `done` then counts its moves. Else None.
        advanced: Number of updates, or steps, by which the module's own scheduler was advanced.
    """

    handle: ModelHandle
    model: PackedModel
    optimizer: torch.optim.Optimizer | None
    updates: int | None
    done: int = 0
    step: int = 0
    loss_scale: LossScale | None = None
    average: Average | None = None
    advanced: int = 0

    @property
    def scaled_by(self) -> float:
        """The factor on the role's losses, and on its gradients until they are applied."""
        return 1.0 if self.loss_scale is None else self.loss_scale.factor

    @property
    def settings(self) -> Optimizer:
        """Settings of the role's optimizer; only for a trained role."""
        assert self.handle.optimizer is not None, self.handle.model
        return self.handle.optimizer

    def set_learning_rates(self) -> None:
        """Set the learning rate of each group of parameters for the next update."""
        assert self.optimizer is not None
        settings = self.settings
        done = self.step if settings.interval == "steps" else self.done
        if isinstance(settings, GroupedOptimizer) and settings.scheduler is not None:
            settings.advance(done - self.advanced)
            self.advanced = done
            return
        for group in self.optimizer.param_groups:
            highest = group.get("highest_lr", settings.lr)
            group["lr"] = scheduled(replace(settings, lr=highest), done, self.updates)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """A context in which an update has length 0. Afterwards the rates are as before: a scheduler may read them."""
        assert self.optimizer is not None
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        yield
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    @property
    def learning_rates(self) -> dict[str, float]:
        """The learning rates of the last update, by the ending of their names in the metrics: `/pg1`, ... if many."""
        assert self.optimizer is not None
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return {"": rates[0]} if len(rates) == 1 else {f"/pg{i}": rate for i, rate in enumerate(rates, start=1)}

    @property
    def kinds(self) -> list[str]:
        """Names of the optimizer's tensors that are shaped as a weight, such as `exp_avg`; none before an update."""
        assert self.optimizer is not None
        kept: dict[str, object] = next(iter(self.optimizer.state.values()), {})
        return sorted(kind for kind, value in kept.items() if isinstance(value, Tensor) and value.dim() > 0)

    def clip_and_step(self, most: float = math.inf, agreed: Callable[[Tensor], Tensor] = Tensor.detach) -> float:
        """Make one update with the gradients in `.grad`, full or divided; returns their norm before clipping.

        The update is skipped if the norm is not finite, or above `most`.

        Args:
            most: The largest norm of a gradient that is used.
            agreed: Function from this rank's norm to the one that all ranks of the role take.
        """
        assert self.optimizer is not None
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if self.loss_scale is not None:
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.div_(self.scaled_by)
        alike = _by_mesh(parameters)
        norms = [_norm(of_mesh) for of_mesh in alike]
        norm = norms[0] if len(norms) == 1 else get_total_norm(norms)
        norm = agreed(norm)
        total = norm.item()
        limit = self.settings.gradient_clipping
        if is_taken(total, most):
            if 0.0 < limit < total:
                for of_mesh in alike:
                    clip_grads_with_norm_(of_mesh, limit, norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def _by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in lists by the mesh of ranks that divides them, as torch takes norms only within a mesh."""
    found = defaultdict(list)
    for parameter in parameters:
        found[getattr(parameter, "device_mesh", None)].append(parameter)
    return [*found.values()] or [[]]


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    """The norm of their gradients, full or divided, as a plain tensor."""
    from torch.distributed.tensor import DTensor  # imported here, as it takes half a second

    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@dataclass
class LossScale:
    """The factor on a loss with gradients in float16. Without it small gradients become 0; if too large, it overflows.

    The factor is a power of 2. An update whose gradient overflowed halves it, and many updates without an overflow
    double it: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2. It depends on the role's
    updates alone, so it is the same on all ranks of the role, which see the same gradient.

    Attributes:
        factor: Factor on the loss; gradients are divided by it before they are clipped.
        clean: Number of updates since the factor last changed.
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
        """Whether there is a smaller factor to try."""
        return self.factor > LEAST

    def record(self) -> tuple[float, int]:
        """The numbers that a checkpoint stores; `LossScale(*record)` restores them."""
        return self.factor, self.clean


@dataclass
class Average:
    """The moving average of another role's weights, in the parts that a rank holds.

    Attributes:
        owner: The role that the average follows.
        decay: Factor on the average at a step; the weights have the rest.
        weights: Parameters of the average's model by name, as far as the owner trains these.
        parts: This rank's parts of the average in float32, if the model's weights are narrower. Else empty: the weights
            themselves are the average.
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
        settings: Settings of the optimizer.
        done: Number of updates, or steps, before this one.
        updates: Number of updates, or steps, in the whole run; only a schedule that falls needs it.
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
    """Whether a gradient of this norm is used for an update."""
    return math.isfinite(norm) and norm <= most


def begun(like: TensorRange, weights: TensorRange) -> TensorRange:
    """The first value of an average: a copy of the weights, in float32 or wider.

    Args:
        like: The range of the owner's weights that this rank has, and its device.
        weights: A range of the same parameter that includes that one.
    """
    first = like.start - weights.start
    values = weights.values[first : first + like.values.numel()]
    return TensorRange(
        like.start, values.to(like.values.device, torch.promote_types(values.dtype, torch.float32), copy=True)
    )


@torch.no_grad()
def move(average: TensorRange, weights: TensorRange, decay: float) -> None:
    """Set the average a to a + (1 - decay) (w - a).

    Each number is computed by itself, so the bits do not depend on how ranks divide the average.

    Args:
        average: This rank's part of the average; changed in place.
        weights: Same range of the weights w that the average follows.
        decay: Factor on the average, from 0 to 1; with 0.9 a tenth of the difference is added.
    """
    assert (average.start, len(average.values)) == (weights.start, len(weights.values))
    change: Tensor = weights.values.to(average.values) - average.values
    average.values.add_(change.mul_(1 - decay))
