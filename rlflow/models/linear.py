"""Linear layers in float32 on the CPU by oneDNN, which torch has aboard and uses for other dtypes only.

Torch multiplies float32 matrices by MKL, which leaves AVX-512 unused on processors that are not Intel's: on a Zen 5
core 110 GFLOP/s, where oneDNN reaches 250.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def use_onednn(model: nn.Module) -> None:
    """Let the model's linear layers compute by oneDNN where they can; their parameters stay as they are."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDNNLinear


class OneDNNLinear(nn.Linear):
    """As `nn.Linear`, and the same to float32's precision."""

    def forward(self, input: Tensor) -> Tensor:
        if not (input.is_cpu and input.dtype == self.weight.dtype == torch.float32):
            return super().forward(input)
        apply: Any = _Linear.apply
        output: Tensor = apply(input.flatten(0, -2), self.weight, self.bias)
        return output.view(*input.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        (grad,) = grads
        for_input, for_weight, for_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.T) if for_input else None,
            _product(grad.T.contiguous(), input.T) if for_weight else None,  # oneDNN is slow where both sides are views
            grad.sum(0) if for_bias else None,
        )


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """`left @ right.T + bias`."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return product
