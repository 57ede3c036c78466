"""One update of a role: its learning rate, its gradients clipped, its optimizer's step."""

from __future__ import annotations

import math

from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlflow.models.optimizer import Optimizer
from rlflow.strategies.roles import Role


def scheduled(settings: Optimizer, done: int, updates: int | None) -> float:
    """The learning rate after `done` updates or steps: a linear warm-up, then constant, or falling to 0 after all."""
    if done < settings.warmup_steps:
        return settings.lr * (done + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    assert updates is not None
    progress = (done - settings.warmup_steps) / max(1, updates - settings.warmup_steps)
    left = max(0.0, 1.0 - progress)
    return settings.lr * (left if settings.schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * left)))


def clip_and_step(role: Role, most: float = math.inf) -> float:
    """One update of a role whose gradients lie in `.grad`, full or divided.

    Skipped if their norm is not finite, or above `most`.
    """
    assert role.optimizer is not None
    parameters = [parameter for parameter in role.model.parameters() if parameter.grad is not None]
    if role.loss_scale is not None:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.div_(role.scaled_by)
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    total = norm.item()
    limit = role.settings.gradient_clipping
    if is_taken(total, most):
        if 0.0 < limit < total:
            clip_grads_with_norm_(parameters, limit, norm)
        role.optimizer.step()
    role.optimizer.zero_grad()
    return total


def is_taken(norm: float, most: float) -> bool:
    """Whether an update of a gradient of this norm is made."""
    return math.isfinite(norm) and norm <= most
