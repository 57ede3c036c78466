"""Log-probabilities and entropy of tokens, straight from hidden states, in chunks.

With a vocabulary of 150 thousand the logits of one micro-batch take more memory than all else together. Here they
exist for one chunk of tokens at a time, in the backward pass as in the forward, which costs computing them twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Logits held at once: 256 MiB in float32, of which two to three copies live at the peak.
CHUNK_ELEMENTS = 2**26


class TokenHead(nn.Module):
    """A model's output layer that returns log-probabilities and entropy in place of logits.

    It holds the layer's own weight, tied or not, and does its work within its own forward: there ZeRO-3 gathers it.

    Args:
        weight: `[V, H]`, the weight of the layer that it replaces.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """`[N, H]` hidden states and `[N]` targets to `[N]` log-probabilities and `[N]` entropies."""
        return token_logprobs(hidden, self.weight, targets, temperature)


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, chunk_elements: int = CHUNK_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under `softmax(hidden @ weight.T / temperature)`, and that distribution's entropy.

    Both are differentiable by `hidden` and `weight`. The softmax is taken in float32, in float64 where `hidden` is.

    Args:
        hidden: `[N, H]`.
        weight: `[V, H]`.
        targets: `[N]` int64.
        temperature: Divides the logits; above 0.
        chunk_elements: Most logits held at once; at least one token's are.

    Returns:
        `[N]` log-probabilities and `[N]` entropies in nats.
    """
    apply: Any = _TokenLogprobs.apply
    result: tuple[Tensor, Tensor] = apply(hidden, weight, targets, temperature, chunk_elements)
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_elements: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(targets.shape, dtype=dtype)
        entropy = torch.empty_like(logprobs)
        rows = max(1, chunk_elements // weight.shape[0])
        for i in range(0, len(targets), rows):
            chunk = slice(i, i + rows)
            logprobs[chunk], entropy[chunk] = _scores(hidden[chunk], weight, targets[chunk], temperature, dtype)
        ctx.rows, ctx.temperature = rows, temperature
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, weight, targets, entropy = ctx.saved_tensors
        grad_logprobs = torch.zeros_like(entropy) if grads[0] is None else grads[0]
        grad_entropy = grads[1]
        grad_hidden = torch.empty_like(hidden)
        # A sum over chunks, so kept wider than bfloat16.
        grad_weight = torch.zeros_like(weight, dtype=entropy.dtype) if ctx.needs_input_grad[1] else None
        for i in range(0, len(targets), ctx.rows):
            chunk = slice(i, i + ctx.rows)
            grad = _logits_gradient(
                _log_softmax(hidden[chunk], weight, ctx.temperature, entropy.dtype),
                targets[chunk, None],
                entropy[chunk, None],
                grad_logprobs[chunk, None],
                None if grad_entropy is None else grad_entropy[chunk, None],
            )
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, hidden[chunk])
            del grad  # before the next chunk's logits are made
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """`[n, V]` in `dtype`: of the logits divided by the temperature, not the logprobs divided by it."""
    logits = (hidden @ weight.T).to(dtype)
    return logits.div_(temperature).log_softmax(1)


def _scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`[n]` log-probabilities and entropies of one chunk."""
    everything = _log_softmax(hidden, weight, temperature, dtype)  # [n, V]
    return everything.gather(1, targets[:, None])[:, 0], -everything.exp().mul_(everything).sum(1)


def _logits_gradient(
    everything: Tensor, targets: Tensor, entropy: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor | None
) -> Tensor:
    """`[n, V]`, of the logits divided by the temperature; overwrites `everything`, the other arguments are `[n, 1]`.

    With p = softmax(z): d logp[target] / dz = onehot - p, and d entropy / dz = -p * (logp + entropy).
    """
    probs = everything.exp()
    factor = grad_logprobs
    if grad_entropy is not None:
        factor = everything.add_(entropy).mul_(grad_entropy).add_(grad_logprobs)
    return probs.mul_(factor).neg_().scatter_add_(1, targets, grad_logprobs)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`, where `total` may be of a wider dtype."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)  # without a product of the weight's size beside it
    else:
        total += left @ right
