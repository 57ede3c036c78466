"""Log-probabilities and entropy of tokens, straight from hidden states, in chunks.

With a vocabulary of 150 thousand the logits of one micro-batch take more memory than all else together. Here they
exist for one chunk of tokens at a time, in the backward pass as in the forward, which costs computing them twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Logits held at once; 2**25 are 128 MiB in float32, of which about three copies live at the peak.
CHUNK_ELEMENTS = 2**25


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
        ctx.rows = max(1, chunk_elements // weight.shape[0])
        ctx.temperature = temperature
        for i in range(0, len(targets), ctx.rows):
            chunk = slice(i, i + ctx.rows)
            everything = _log_softmax(hidden[chunk], weight, temperature, dtype)  # [n, V]
            logprobs[chunk] = everything.gather(1, targets[chunk, None])[:, 0]
            entropy[chunk] = -everything.exp().mul_(everything).sum(1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, targets, entropy = ctx.saved_tensors
        dtype = entropy.dtype
        grad_hidden = torch.empty_like(hidden)
        # Summed over chunks, so kept wider than bfloat16.
        grad_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        for i in range(0, len(targets), ctx.rows):
            chunk = slice(i, i + ctx.rows)
            logprobs = _log_softmax(hidden[chunk], weight, ctx.temperature, dtype)  # [n, V]
            # With p = softmax(z): d logp[target] / dz = onehot - p, and d entropy / dz = -p * (logp + entropy).
            probs = logprobs.exp()
            grad = torch.zeros_like(probs)
            if grad_logprobs is not None:
                grad -= probs * grad_logprobs[chunk, None]
                grad.scatter_add_(1, targets[chunk, None], grad_logprobs[chunk, None])
            if grad_entropy is not None:
                grad -= probs * (logprobs + entropy[chunk, None]) * grad_entropy[chunk, None]
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[chunk]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """`[n, V]` in `dtype`: of the logits divided by the temperature, not the logprobs divided by it."""
    logits = (hidden @ weight.T).to(dtype)
    return logits.div_(temperature).log_softmax(1)
