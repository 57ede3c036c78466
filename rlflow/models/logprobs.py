"""Log-probabilities and entropy of tokens, straight from hidden states, in chunks.

With a vocabulary of 150 thousand the logits of one micro-batch take more memory than all else together. Here they
exist for one chunk of tokens at a time, in the backward pass as in the forward, which costs computing them twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

# Logits held at once: 256 MiB in float32, of which two to three copies live at the peak.
CHUNK_ELEMENTS = 2**26


# Settings of configurations that shape logits, and the types of models in which their meaning is known.
LOGIT_SETTINGS = {
    "logit_scale": {"cohere", "cohere2", "cohere2_moe"},  # multiplies
    "logits_scaling": {"granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"},  # divides
    "final_logit_softcapping": {"gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "vaultgemma", "nanochat"},
}


@dataclass(frozen=True)
class LogitShape:
    """What a model makes of the products of its output layer: z to `cap * tanh(scale * z / cap)`.

    Attributes:
        scale: Factor on the products.
        cap: No logit is larger; None for `scale * z`.
    """

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitShape:
        """That of a transformers configuration whose type of model is known, see `unknown_logit_settings`."""
        text = config.get_text_config()
        known = {name: getattr(text, name, None) for name, types in LOGIT_SETTINGS.items() if text.model_type in types}
        scale = (known.get("logit_scale") or 1.0) / (known.get("logits_scaling") or 1.0)
        return cls(scale, known.get("final_logit_softcapping"))

    def logits(self, products: Tensor) -> Tensor:
        """Overwrites `products`."""
        logits = products if self.scale == 1.0 else products.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def derivative(self, logits: Tensor) -> Tensor | float:
        """Of the logits by the products, at these logits."""
        if self.cap is None:
            return self.scale
        return logits.div(self.cap).square_().neg_().add_(1).mul_(self.scale)


PLAIN = LogitShape()


def unknown_logit_settings(config: Any) -> list[str]:
    """Settings that shape the logits of a model in whose type their meaning is not known, such as `logits_scaling 3.0`.

    HyperCLOVA X multiplies by what Granite divides by.
    """
    text = config.get_text_config()
    unknown = [name for name, types in LOGIT_SETTINGS.items() if text.model_type not in types]
    return [f"{name} {value}" for name in unknown if (value := getattr(text, name, None)) not in (None, 1.0)]


class Readout(Protocol):
    """What an output layer computes of hidden states, within its own forward; see `rlflow.models.language_scores`."""

    def __call__(
        self, layer: TokenHead, hidden: Tensor, targets: Tensor, temperature: float, beside: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Values of each hidden state, `[N, ...]`; the arguments are those of `TokenHead.forward`."""


class TokenHead(nn.Module):
    """A model's output layer that returns log-probabilities and entropy in place of logits.

    It holds the layer's own weight, tied or not, and does its work within its own forward: there ZeRO-3 gathers it.

    Args:
        weight: `[V, H]`, the weight of the layer that it replaces.
        shape: What the model makes of its products.

    Attributes:
        wide: Whether products are computed in float32 at least, of numbers of less (MiniMax-M1, arXiv 2506.13585,
            section 3.2; ScaleRL, arXiv 2510.13786).
    """

    wide = False

    def __init__(self, weight: nn.Parameter, shape: LogitShape = PLAIN) -> None:
        super().__init__()
        self.weight = weight
        self.shape = shape

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        readout: Readout | None = None,
        beside: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """`[N, H]` hidden states and `[N]` targets to `[N]` log-probabilities and `[N]` entropies, or to a readout's.

        Args:
            hidden: `[N, H]`.
            targets: `[N]` int64.
            temperature: Divides the logits.
            readout: What to compute instead of the two.
            beside: `[N, ...]`, what the readout compares with, if anything.
        """
        if readout is not None:
            return readout(self, hidden, targets, temperature, beside)
        return token_logprobs(hidden, self.weight, targets, temperature, shape=self.shape, wide=self.wide)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., H]` hidden states to the products `[..., V]` of the layer that this replaces."""
        return nn.functional.linear(hidden, self.weight)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
    shape: LogitShape = PLAIN,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under `softmax(logits / temperature)`, and that distribution's entropy.

    The logits are `hidden @ weight.T`, scaled and capped as `shape` has it. Both results are differentiable by `hidden`
    and `weight`. The softmax is taken in float32, in float64 where `hidden` is.

    Args:
        hidden: `[N, H]`.
        weight: `[V, H]`.
        targets: `[N]` int64.
        temperature: Divides the logits; above 0.
        chunk_elements: Most logits held at once; at least one token's are.
        shape: What the model makes of the products.
        wide: Take the products in the softmax's dtype too; `weight` is then held once more, in it, meanwhile.

    Returns:
        `[N]` log-probabilities and `[N]` entropies in nats.
    """
    logprobs, entropy, _ = logprobs_of_tokens(
        hidden, weight, targets[:, None], temperature, 0, chunk_elements, shape, wide
    )
    return logprobs[:, 0], entropy


def logprobs_of_tokens(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    top: int = 0,
    chunk_elements: int = CHUNK_ELEMENTS,
    shape: LogitShape = PLAIN,
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `token_logprobs`, of several tokens at each place: given ones, and the likeliest.

    Args:
        hidden: `[N, H]`.
        weight: `[V, H]`.
        ids: `[N, K]` int64.
        temperature: See `token_logprobs`, also for the rest.
        top: How many of the likeliest tokens are added, likeliest first.
        chunk_elements: Most logits held at once.
        shape: What the model makes of the products.
        wide: Take the products in the softmax's dtype too.

    Returns:
        `[N, K + top]` log-probabilities, `[N]` entropies, and `[N, K + top]` the tokens, of which `ids` are the first.
    """
    apply: Any = _TokenLogprobs.apply
    result: tuple[Tensor, Tensor, Tensor] = apply(hidden, weight, ids, temperature, top, chunk_elements, shape, wide)
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float,
        top: int,
        chunk_elements: int,
        shape: LogitShape,
        wide: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        products_in = dtype if wide else hidden.dtype
        given, weight = weight, weight.to(products_in)
        number, known = ids.shape
        tokens = ids.new_empty(number, known + top)
        tokens[:, :known] = ids
        logprobs = hidden.new_empty(tokens.shape, dtype=dtype)
        entropy = hidden.new_empty(number, dtype=dtype)
        rows = max(1, chunk_elements // weight.shape[0])
        for i in range(0, number, rows):
            chunk = slice(i, i + rows)
            products = (hidden[chunk].to(products_in) @ weight.T).to(dtype)
            everything = log_softmax(shape.logits(products), temperature)  # [n, V]
            if top:
                tokens[chunk, known:] = everything.topk(top, dim=1).indices
            logprobs[chunk] = everything.gather(1, tokens[chunk])
            entropy[chunk] = -everything.exp().mul_(everything).sum(1)
            del products, everything  # before the next chunk's are made
        ctx.rows, ctx.temperature, ctx.shape, ctx.products_in = rows, temperature, shape, products_in
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(tokens)
        ctx.save_for_backward(hidden, given, tokens, entropy)
        return logprobs, entropy, tokens

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, given, tokens, entropy = ctx.saved_tensors
        weight = given.to(ctx.products_in)
        grad_logprobs = entropy.new_zeros(tokens.shape) if grads[0] is None else grads[0]
        grad_entropy = grads[1]
        grad_hidden = torch.empty_like(hidden)
        # A sum over chunks, so kept wider than bfloat16.
        grad_weight = torch.zeros_like(given, dtype=entropy.dtype) if ctx.needs_input_grad[1] else None
        for i in range(0, len(tokens), ctx.rows):
            chunk = slice(i, i + ctx.rows)
            read = hidden[chunk].to(ctx.products_in)
            logits = ctx.shape.logits((read @ weight.T).to(entropy.dtype))
            derivative = ctx.shape.derivative(logits)
            everything = log_softmax(logits, ctx.temperature)
            del logits
            grad = _logits_gradient(
                everything,
                tokens[chunk],
                entropy[chunk, None],
                grad_logprobs[chunk],
                None if grad_entropy is None else grad_entropy[chunk, None],
            )
            grad = grad.div_(ctx.temperature).mul_(derivative).to(ctx.products_in)
            grad_hidden[chunk] = grad @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad.T, read)
            del grad, everything, derivative  # before the next chunk's logits are made
        return grad_hidden, None if grad_weight is None else grad_weight.to(given.dtype), *[None] * 6


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """`[n, V]`, of the logits divided by the temperature, not the logprobs divided by it; overwrites `logits`."""
    return logits.div_(temperature).log_softmax(1)


def _logits_gradient(
    everything: Tensor, tokens: Tensor, entropy: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor | None
) -> Tensor:
    """`[n, V]`, of the logits divided by the temperature; overwrites `everything`.

    With p = softmax(z): d logp[token] / dz = onehot - p, and d entropy / dz = -p * (logp + entropy). `tokens` and
    `grad_logprobs` are `[n, K]`, entropy and its gradient `[n, 1]`.
    """
    probs = everything.exp()
    factor = grad_logprobs if grad_logprobs.shape[1] == 1 else grad_logprobs.sum(1, keepdim=True)
    if grad_entropy is not None:
        factor = everything.add_(entropy).mul_(grad_entropy).add_(factor)
    return probs.mul_(factor).neg_().scatter_add_(1, tokens, grad_logprobs)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`, where `total` may be of a wider dtype."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)  # without a product of the weight's size beside it
    else:
        total += left @ right
