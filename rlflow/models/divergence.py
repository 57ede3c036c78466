"""The Kullback-Leibler divergence of two models' distributions over the whole vocabulary, in chunks of tokens.

Like log-probabilities (`rlflow.models.logprobs`), it is computed from hidden states: the logits of both models exist
for one chunk of tokens at a time, in the backward pass as in the forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.models.logprobs import CHUNK_ELEMENTS, PLAIN, LogitShape, add_product, log_softmax


@dataclass(frozen=True)
class Softmax:
    """How the products of an output layer become a distribution over the vocabulary.

    Attributes:
        temperature: Divides the logits; above 0.
        shape: What the model makes of the products.
        wide: Take the products in float32 at least.
    """

    temperature: float = 1.0
    shape: LogitShape = PLAIN
    wide: bool = False

    def products_in(self, hidden: Tensor) -> torch.dtype:
        """In which products are taken."""
        return torch.promote_types(hidden.dtype, torch.float32) if self.wide else hidden.dtype

    def logits(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`[n, V]` in `dtype`, of hidden states `[n, H]`; the weight is in `products_in` already."""
        return self.shape.logits((hidden.to(weight.dtype) @ weight.T).to(dtype))


def token_kl(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    softmax: Softmax,
    other_hidden: Tensor,
    other_weight: Tensor,
    other_softmax: Softmax,
    over_other: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """KL(p || q) at each token, with p from `hidden` and q from `other_hidden`; or KL(q || p).

    With z the logits of p divided by its temperature T, and l = log p - log q: d KL(p || q) / dz = p (l - KL), and
    d KL(q || p) / dz = p - q. Only p gets a gradient. The softmax is taken in float32, in float64 where `hidden` is.

    Args:
        hidden: `[N, H]`.
        weight: `[V, H]`.
        targets: `[N]` int64.
        softmax: Of p.
        other_hidden: `[N, H']`.
        other_weight: `[V, H']`.
        other_softmax: Of q.
        over_other: Take KL(q || p).
        chunk_elements: Most logits held at once, of both together; at least one token's are.

    Returns:
        `[N]` in nats, and `[N]` log-probabilities of the targets under p, without a gradient.
    """
    apply: Any = _TokenKL.apply
    result: tuple[Tensor, Tensor] = apply(
        hidden, weight, targets, softmax, other_hidden, other_weight, other_softmax, over_other, chunk_elements
    )
    return result


class _TokenKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        softmax: Softmax,
        other_hidden: Tensor,
        other_weight: Tensor,
        other_softmax: Softmax,
        over_other: bool,
        chunk_elements: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        own, other = weight.to(softmax.products_in(hidden)), other_weight.to(other_softmax.products_in(other_hidden))
        kl = hidden.new_empty(targets.shape, dtype=dtype)
        logprobs = torch.empty_like(kl)
        ctx.rows = max(1, chunk_elements // (2 * len(weight)))
        for i in range(0, len(targets), ctx.rows):
            chunk = slice(i, i + ctx.rows)
            log_p = log_softmax(softmax.logits(hidden[chunk], own, dtype), softmax.temperature)  # [n, V]
            logprobs[chunk] = log_p.gather(1, targets[chunk, None])[:, 0]
            log_q = log_softmax(other_softmax.logits(other_hidden[chunk], other, dtype), other_softmax.temperature)
            if over_other:
                kl[chunk] = log_p.sub_(log_q).neg_().mul_(log_q.exp_()).sum(1)
            else:
                kl[chunk] = log_q.sub_(log_p).neg_().mul_(log_p.exp_()).sum(1)
            del log_p, log_q  # before the next chunk's are made
        ctx.softmax, ctx.other_softmax, ctx.over_other = softmax, other_softmax, over_other
        ctx.mark_non_differentiable(logprobs)
        ctx.save_for_backward(hidden, weight, other_hidden, other_weight, kl)
        return kl, logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, other_hidden, other_weight, kl = ctx.saved_tensors
        softmax, other_softmax, dtype = ctx.softmax, ctx.other_softmax, kl.dtype
        own, other = weight.to(softmax.products_in(hidden)), other_weight.to(other_softmax.products_in(other_hidden))
        grad_hidden = torch.empty_like(hidden)
        # A sum over chunks, so kept wider than bfloat16.
        grad_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        for i in range(0, len(kl), ctx.rows):
            chunk = slice(i, i + ctx.rows)
            read = hidden[chunk].to(own.dtype)
            logits = softmax.logits(read, own, dtype)
            derivative = softmax.shape.derivative(logits)
            log_p = log_softmax(logits, softmax.temperature)
            del logits
            log_q = log_softmax(other_softmax.logits(other_hidden[chunk], other, dtype), other_softmax.temperature)
            if ctx.over_other:
                grad = log_p.exp_().sub_(log_q.exp_())
            else:
                grad = log_q.sub_(log_p).neg_().sub_(kl[chunk, None]).mul_(log_p.exp_())
            del log_q, log_p
            grad = grad.mul_(grads[0][chunk, None]).div_(softmax.temperature).mul_(derivative).to(own.dtype)
            grad_hidden[chunk] = grad @ own
            if grad_weight is not None:
                add_product(grad_weight, grad.T, read)
            del grad, derivative  # before the next chunk's logits are made
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 7
