"""Compares a gradient with the derivative of the loss, along random directions and in float64."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DIRECTIONS = 8
LIMIT = 1e-6  # largest difference that is rounding
STEPS = (1e-4, 1e-6)  # lengths by which the weights are moved; the longer is more exact


class DetachedValues(TorchFunctionMode):
    """Records what a train node detaches, and repeats it: values that depend on the weights and carry no gradient.

    The first call of the node is recorded; later calls get the recorded numbers in the same order. So PPO's ratio
    `exp(logprobs - logprobs.detach())` moves with the weights, though its value at any weights is 1.

    Attributes:
        values: Detached values, in the order of the calls.
        paused: Whether nothing is recorded or held: within a model's forward pass, or an autograd function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor | float] = []
        self.paused = False
        self._place: int | None = None

    def again(self) -> DetachedValues:
        """The same values, for another call of the node."""
        self._place = 0
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function; a result that is cut off from the weights is recorded, or replaced by the recorded one."""
        found = func(*args, **(kwargs or {}))
        if self.paused or not _carries_none(found) or not any(_carries(each) for each in _inputs(args, kwargs)):
            return found
        if self._place is None:
            self.values.append(found.clone() if isinstance(found, Tensor) else found)
            return found
        self._place += 1
        return self.values[self._place - 1]

    def without(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, wrapped so that nothing is recorded or held within it."""

        def called(*arguments: Any, **named: Any) -> Any:
            before, self.paused = self.paused, True
            try:
                return function(*arguments, **named)
            finally:
                self.paused = before

        return called

    @contextmanager
    def holding(self) -> Iterator[None]:
        """A context for one call of the node."""
        applied = self.without(torch.autograd.Function.apply.__func__)  # type: ignore[attr-defined]
        with mock.patch.object(torch.autograd.Function, "apply", classmethod(applied)), self:
            yield


def _inputs(args: Sequence[Any], kwargs: dict[str, Any] | None) -> Iterator[Any]:
    for each in (*args, *(kwargs or {}).values()):
        yield from each if isinstance(each, list | tuple) else (each,)


def _carries(given: Any) -> bool:
    return isinstance(given, Tensor) and given.requires_grad


def _carries_none(found: Any) -> bool:
    if isinstance(found, Tensor):
        return found.is_floating_point() and not found.requires_grad
    return isinstance(found, float)


def apart(weights: Sequence[Tensor], gradients: Sequence[Tensor], loss: Callable[[], float]) -> float:
    """The distance of the gradient from the derivative of the loss along 8 random directions.

    The derivative is taken from the loss at four points, -2, -1, 1 and 2 steps along a direction of length 1. Where it
    is apart from the gradient it is taken once more by shorter steps, since a token may have crossed a clip's end on
    the longer ones. A gradient of `n` numbers has a derivative of about norm / sqrt(n) along such a direction.

    Args:
        weights: Trained weights, which are the same afterwards.
        gradients: Gradient of each.
        loss: Returns the loss at the present weights, with detached values held at their old ones.

    Returns:
        The largest difference, over norm / sqrt(n).
    """
    found = _apart(weights, gradients, loss, STEPS[0])
    return found if found < LIMIT else min(found, _apart(weights, gradients, loss, STEPS[1]))


def _apart(weights: Sequence[Tensor], gradients: Sequence[Tensor], loss: Callable[[], float], step: float) -> float:
    draw = torch.Generator().manual_seed(0)
    norm = math.sqrt(sum(float(each.square().sum()) for each in gradients))
    count = sum(each.numel() for each in weights)
    before, largest = [each.detach().clone() for each in weights], 0.0
    for _ in range(DIRECTIONS):
        direction = [torch.randn(each.shape, generator=draw, dtype=each.dtype) for each in weights]
        length = math.sqrt(sum(float(each.square().sum()) for each in direction))
        at = {}
        for steps in (-2, -1, 1, 2):
            with torch.no_grad():
                for weight, first, along in zip(weights, before, direction, strict=True):
                    weight.copy_(first + along * (steps * step / length))
            at[steps] = loss()
        derivative = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * step)
        expected = sum(float((a * b).sum()) for a, b in zip(direction, gradients, strict=True)) / length
        largest = max(largest, abs(derivative - expected) / max(norm / math.sqrt(count), sys.float_info.min))
    with torch.no_grad():
        for weight, first in zip(weights, before, strict=True):
            weight.copy_(first)
    return largest


@contextmanager
def wide_casts() -> Iterator[None]:
    """A context in which float64 stays float64 where norms, rotary embeddings and routers cast to float32.

    So nothing is rounded to float32 on the way from the weights to the loss, and derivatives can be taken.
    """
    to, narrow, typed, softmax = Tensor.to, Tensor.float, Tensor.type, torch.nn.functional.softmax

    def widens(value: Any) -> bool:
        caller = sys._getframe(2).f_globals["__name__"]
        return bool(value.dtype == torch.float64 and caller.startswith("transformers."))

    def wide(given: Any) -> Any:
        return torch.float64 if given is torch.float32 else given

    def to_wide(self: Tensor, *args: Any, **keywords: Any) -> Tensor:
        if widens(self):
            args, keywords = tuple(map(wide, args)), {name: wide(given) for name, given in keywords.items()}
        return to(self, *args, **keywords)

    def float_wide(self: Tensor) -> Tensor:
        return self if widens(self) else narrow(self)

    def type_wide(self: Tensor, *args: Any, **keywords: Any) -> Any:
        return typed(self, *(map(wide, args) if widens(self) else args), **keywords)

    def softmax_wide(input: Tensor, *args: Any, **keywords: Any) -> Tensor:
        if widens(input):
            keywords = {name: wide(given) for name, given in keywords.items()}
        return softmax(input, *args, **keywords)

    with (
        mock.patch.object(Tensor, "to", to_wide),
        mock.patch.object(Tensor, "float", float_wide),
        mock.patch.object(Tensor, "type", type_wide),
        mock.patch.object(torch.nn.functional, "softmax", softmax_wide),
    ):
        yield
