"""The moving average of a trained role's weights, in the parts that a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rlflow.models.tensor_range import TensorRange


@dataclass
class Average:
    """Of a role that follows another.

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


def begun(like: TensorRange, weights: TensorRange) -> TensorRange:
    """What an average starts as: the range of `like`, which this rank has of the owner, of weights that hold it."""
    first = like.start - weights.start
    values = weights.values[first : first + like.values.numel()]
    return TensorRange(
        like.start, values.to(like.values.device, torch.promote_types(values.dtype, torch.float32), copy=True)
    )


@torch.no_grad()
def move(average: TensorRange, weights: TensorRange, decay: float) -> None:
    """a + (1 - decay) (w - a), rounded of each number alone, so that no division over ranks changes a bit."""
    assert (average.start, len(average.values)) == (weights.start, len(weights.values))
    change: Tensor = weights.values.to(average.values) - average.values
    average.values.add_(change.mul_(1 - decay))


def averaged_parts(
    average: Average, part_of: Callable[[nn.Parameter], TensorRange]
) -> Iterator[tuple[str, TensorRange]]:
    """This rank's part of each averaged weight, by name."""
    for name, parameter in average.weights.items():
        yield name, average.parts[name] if average.parts else part_of(parameter)
