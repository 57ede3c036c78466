"""Log-probabilities, entropy and divergence of tokens, straight from hidden states, in chunks.

With a vocabulary of 150 thousand the logits of one micro-batch take more memory than all else together. Here they
exist for one chunk of tokens at a time. The backward pass computes them a second time, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Logits in memory at one time: 256 MiB in float32; at the peak there are two to three copies of them. With each chunk
# the backward pass reads and writes a float32 gradient of the weight's size, so a GPU takes larger ones: 1 GiB of 80.
CHUNK_ELEMENTS = 2**26
LARGEST_CHUNK = 2**28
# In place of the logits of tokens outside of a support: their probability is 0, and 0 times this is 0, not NaN.
OUTSIDE = -1e30
COPIES_OF_MEMORY = 24  # so many times three copies of a chunk fit in a GPU's memory


# Settings of configurations that shape logits, and the types of models in which their meaning is known.
LOGIT_SETTINGS = {
    "lm_head_multiplier": {"falcon_h1"},  # a factor on the logits
    "logit_scale": {"cohere", "cohere2", "cohere2_moe"},  # a factor on the logits
    "logits_scaling": {  # a divisor
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
    },
    "final_logit_softcapping": {"gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "vaultgemma", "nanochat"},
}


@dataclass(frozen=True)
class Softmax:
    """Map of an output layer's products z to a distribution: `softmax(cap * tanh(scale * z / cap) / temperature)`.

    Attributes:
        temperature: Temperature that divides the logits, above 0; or `[N]`, one for each token.
        scale: Factor on the products.
        cap: Bound of the logits; None for `scale * z` without a bound.
        wide: Compute the products in float32 at least, also of bfloat16 states (MiniMax-M1, arXiv 2506.13585, section
            3.2; ScaleRL, arXiv 2510.13786). A float32 copy of the weight exists meanwhile.
    """

    temperature: float | Tensor = 1.0
    scale: float = 1.0
    cap: float | None = None
    wide: bool = False

    @classmethod
    def of(cls, config: Any) -> Softmax:
        """The softmax that a transformers configuration sets, for known types; see `unknown_logit_settings`."""
        text = config.get_text_config()
        known = {name: getattr(text, name, None) for name, types in LOGIT_SETTINGS.items() if text.model_type in types}
        factor = (known.get("logit_scale") or 1.0) * (known.get("lm_head_multiplier") or 1.0)
        scale = factor / (known.get("logits_scaling") or 1.0)
        return cls(scale=scale, cap=known.get("final_logit_softcapping"))

    def products_in(self, hidden: Tensor) -> torch.dtype:
        """The dtype in which products are computed."""
        return torch.promote_types(hidden.dtype, torch.float32) if self.wide else hidden.dtype

    def logits(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits `[n, V]` in `dtype` of hidden states `[n, H]`; `weight` has the dtype `products_in` already."""
        logits = (hidden.to(weight.dtype) @ weight.T).to(dtype)
        if self.scale != 1.0:
            logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def derivative(self, logits: Tensor) -> Tensor | float:
        """The derivative of the logits by the products z, at these logits."""
        if self.cap is None:
            return self.scale
        return logits.div(self.cap).square_().neg_().add_(1).mul_(self.scale)

    def logprobs(self, logits: Tensor, support: Tensor | None = None) -> Tensor:
        """`[n, V]`, log-softmax of the logits divided by the temperature; overwrites `logits`.

        Args:
            logits: `[n, V]`.
            support: Tokens over which the softmax is, see `token_logprobs`; those of others are about `OUTSIDE`.
        """
        logits = self.over_temperature(logits)
        if support is not None:
            ids = support.clamp(min=0)
            inside = torch.full_like(logits, OUTSIDE).scatter_(1, ids, logits.gather(1, ids))
            logits = torch.where(support[:, :1] < 0, logits, inside)
        return logits.log_softmax(1)

    def at(self, chunk: slice) -> Softmax:
        """The softmax of some of the tokens."""
        return replace(self, temperature=self.temperature[chunk]) if isinstance(self.temperature, Tensor) else self

    def over_temperature(self, values: Tensor) -> Tensor:
        """`values` `[n, V]` divided by the temperature in place."""
        if isinstance(self.temperature, Tensor):
            return values.div_(self.temperature.to(values.dtype)[:, None])
        return values if self.temperature == 1.0 else values.div_(self.temperature)


def unknown_logit_settings(config: Any) -> list[str]:
    """Settings that shape the logits, but whose meaning in this type of model is unknown, such as `logits_scaling 3.0`.

    One name may mean two things: HyperCLOVA X multiplies by `logits_scaling`, Granite divides by it.
    """
    text = config.get_text_config()
    unknown = [name for name, types in LOGIT_SETTINGS.items() if text.model_type not in types]
    return [f"{name} {value}" for name in unknown if (value := getattr(text, name, None)) not in (None, 1.0)]


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    softmax: Softmax = Softmax(),
    chunk_elements: int | None = None,
    support: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy of the distribution at its place.

    The distribution is `softmax` of the products `hidden @ weight.T`, computed in float32 (float64 where `hidden` is).
    Both results are differentiable by `hidden` and `weight`.

    Args:
        hidden: `[N, H]`.
        weight: `[V, H]`.
        targets: `[N]` int64.
        softmax: Map of the model's products to a distribution.
        chunk_elements: Most logits in memory at one time, see `chunk_elements_on`; those of one token always are.
        support: `[N, K]` int64, the tokens that have a probability at each place, the target among them, in any order
            and any number of times. Where the first is -1, and where this is None, all tokens have one.

    Returns:
        `[N]` log-probabilities and `[N]` entropies in nats.
    """
    logprobs, entropy, _ = logprobs_of_tokens(hidden, weight, targets[:, None], softmax, 0, chunk_elements, support)
    return logprobs[:, 0], entropy


def logprobs_of_tokens(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    softmax: Softmax = Softmax(),
    top: int = 0,
    chunk_elements: int | None = None,
    support: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `token_logprobs`, for several tokens at each place: given tokens, and the likeliest tokens.

    Args:
        hidden: `[N, H]`.
        weight: `[V, H]`.
        ids: `[N, K]` int64.
        softmax: Map of the model's products to a distribution.
        top: Number of the likeliest tokens that are added, likeliest first.
        chunk_elements: Most logits in memory at one time, see `chunk_elements_on`; those of one token always are.
        support: See `token_logprobs`.

    Returns:
        `[N, K + top]` log-probabilities, `[N]` entropies, and the `[N, K + top]` tokens; the first K are `ids`.
    """
    apply: Any = _TokenLogprobs.apply
    result: tuple[Tensor, Tensor, Tensor] = apply(hidden, weight, ids, softmax, top, chunk_elements, support)
    return result


def chunk_elements_on(device: torch.device) -> int:
    """Logits in memory at one time by default: 2**26 on the CPU; up to 2**28 on a GPU, by how much memory it has."""
    if device.type != "cuda":
        return CHUNK_ELEMENTS
    return chunk_elements_in(torch.cuda.get_device_properties(device).total_memory)


def chunk_elements_in(nbytes: int) -> int:
    """Like `chunk_elements_on`, for a GPU with this number of bytes; a power of two."""
    fit = nbytes // (COPIES_OF_MEMORY * 3 * 4)
    return min(LARGEST_CHUNK, max(CHUNK_ELEMENTS, 1 << max(0, fit.bit_length() - 1)))


def _tokens_of_chunk(chunk_elements: int | None, device: torch.device, vocabulary: int) -> int:
    return max(1, (chunk_elements or chunk_elements_on(device)) // vocabulary)


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies of tokens, with a backward pass that computes the logits again.

    With z the logits divided by the temperature and p = softmax(z): d logp[token] / dz = onehot - p, and
    d entropy / dz = -p * (logp + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        softmax: Softmax,
        top: int,
        chunk_elements: int | None,
        support: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        output_weight = weight.to(softmax.products_in(hidden))
        number, known = ids.shape
        tokens = ids.new_empty(number, known + top)
        tokens[:, :known] = ids
        logprobs = hidden.new_empty(tokens.shape, dtype=dtype)
        entropy = hidden.new_empty(number, dtype=dtype)
        ctx.rows, ctx.softmax = _tokens_of_chunk(chunk_elements, hidden.device, len(weight)), softmax
        for i in range(0, number, ctx.rows):
            chunk = slice(i, i + ctx.rows)
            within = None if support is None else support[chunk]
            here = softmax.at(chunk)
            everything = here.logprobs(here.logits(hidden[chunk], output_weight, dtype), within)  # [n, V]
            if top:
                tokens[chunk, known:] = everything.topk(top, dim=1).indices
            logprobs[chunk] = everything.gather(1, tokens[chunk])
            entropy[chunk] = -everything.exp().mul_(everything).sum(1)
            del everything  # before the next chunk's are made
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(tokens)
        ctx.save_for_backward(hidden, weight, tokens, entropy, support)
        return logprobs, entropy, tokens

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens, entropy, support = ctx.saved_tensors
        softmax: Softmax = ctx.softmax
        grad_logprobs = entropy.new_zeros(tokens.shape) if grads[0] is None else grads[0]
        grad_entropy = grads[1]

        def logprobs_of(chunk: slice, logits: Tensor) -> Tensor:
            return softmax.at(chunk).logprobs(logits, None if support is None else support[chunk])

        def logits_gradient(chunk: slice, logprobs: Tensor) -> Tensor:
            probs, of_tokens = logprobs.exp(), grad_logprobs[chunk]
            factor = of_tokens if of_tokens.shape[1] == 1 else of_tokens.sum(1, keepdim=True)
            if grad_entropy is not None:
                factor = logprobs.add_(entropy[chunk, None]).mul_(grad_entropy[chunk, None]).add_(factor)
            return probs.mul_(factor).neg_().scatter_add_(1, tokens[chunk], of_tokens)

        return *_gradients(ctx, hidden, weight, entropy.dtype, logits_gradient, logprobs_of), *[None] * 5


def divided_logprobs(
    hidden: Tensor,
    rows: Tensor,
    targets: Tensor,
    first: int,
    group: dist.ProcessGroup,
    softmax: Softmax = Softmax(),
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Like `token_logprobs`, on ranks that divide the vocabulary; all of them call it and get the same.

    Nothing of the size of the vocabulary is sent. Forward, each rank sends four numbers of each token. Backward, the
    gradient by `hidden` is summed over the ranks.

    Args:
        hidden: `[N, H]`, the same on all ranks.
        rows: `[V', H]`, this rank's rows of the weight, one at least.
        targets: `[N]` int64, the same on all ranks.
        first: The token of the first of these rows.
        group: Ranks that divide the weight.
        softmax: Map of the model's products to a distribution.
        chunk_elements: Most logits in memory at one time, see `chunk_elements_on`; those of one token always are.
    """
    apply: Any = _DividedLogprobs.apply
    result: tuple[Tensor, Tensor] = apply(hidden, rows, targets - first, softmax, group, chunk_elements)
    return result


class _DividedLogprobs(torch.autograd.Function):
    """`_TokenLogprobs` for an output layer whose rows ranks divide.

    With z the logits divided by the temperature, a rank sends m = max z, s = sum exp(z - m),
    u = sum (z - m) exp(z - m), and z of the target if it has that. With M the largest m of all ranks and
    e = exp(m - M), sums over ranks are S = sum s e and U = sum (u + (m - M) s) e. Then log Z = M + log S, and the
    entropy is log S - U / S.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        places: Tensor,
        softmax: Softmax,
        group: dist.ProcessGroup,
        chunk_elements: int | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        output_weight = weight.to(softmax.products_in(hidden))
        here = (places >= 0) & (places < len(weight))
        places = places.masked_fill(~here, 0)
        own = hidden.new_empty(len(hidden), 4, dtype=dtype)
        ctx.rows, ctx.softmax, ctx.group = _tokens_of_chunk(chunk_elements, hidden.device, len(weight)), softmax, group
        for i in range(0, len(hidden), ctx.rows):
            chunk = slice(i, i + ctx.rows)
            z = softmax.at(chunk).over_temperature(softmax.logits(hidden[chunk], output_weight, dtype))  # [n, V']
            own[chunk, 3] = z.gather(1, places[chunk, None])[:, 0] * here[chunk]
            own[chunk, 0] = largest = z.amax(1)
            powers = z.sub_(largest[:, None]).exp()
            own[chunk, 1] = powers.sum(1)
            own[chunk, 2] = powers.mul_(z).sum(1)
            del z, powers  # before the next chunk's are made
        every = own.new_empty(dist.get_world_size(group), *own.shape)
        dist.all_gather(list(every.unbind()), own, group=group)
        m, s, u, of_target = every.unbind(2)  # [ranks, N]
        whole = m.amax(0)
        share = (m - whole).exp()
        total = (s * share).sum(0)
        log_z = whole + total.log()
        entropy = total.log() - ((u + (m - whole) * s) * share).sum(0) / total
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, places, here, log_z, entropy)
        return of_target.sum(0) - log_z, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, places, here, log_z, entropy = ctx.saved_tensors
        grad_logprobs = torch.zeros_like(entropy) if grads[0] is None else grads[0]
        grad_entropy = grads[1]
        softmax: Softmax = ctx.softmax

        def logprobs_of(chunk: slice, logits: Tensor) -> Tensor:
            return softmax.at(chunk).over_temperature(logits).sub_(log_z[chunk, None])

        def logits_gradient(chunk: slice, logprobs: Tensor) -> Tensor:
            probs, of_targets = logprobs.exp(), grad_logprobs[chunk, None]
            factor = of_targets
            if grad_entropy is not None:
                factor = logprobs.add_(entropy[chunk, None]).mul_(grad_entropy[chunk, None]).add_(factor)
            return probs.mul_(factor).neg_().scatter_add_(1, places[chunk, None], of_targets * here[chunk, None])

        grad_hidden, grad_weight = _gradients(ctx, hidden, weight, entropy.dtype, logits_gradient, logprobs_of)
        dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, grad_weight, *[None] * 4


def _gradients(
    ctx: Any,
    hidden: Tensor,
    given: Tensor,
    dtype: torch.dtype,
    logits_gradient: Callable[[slice, Tensor], Tensor],
    logprobs_of: Callable[[slice, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients by the hidden states and, if needed, by the weight `given`; chunk by chunk like the forward pass.

    Args:
        ctx: Context that has the softmax, and `rows`, the tokens of a chunk.
        hidden: `[N, H]`.
        given: `[V, H]`.
        dtype: Dtype of the logits.
        logits_gradient: Function from a chunk and its log-probabilities `[n, V]`, which it may overwrite, to the
            gradient by the logits divided by the temperature.
        logprobs_of: Function from a chunk and its logits, which it may overwrite, to its log-probabilities; None for
            those of the softmax over these logits.
    """
    softmax = ctx.softmax
    weight = given.to(softmax.products_in(hidden))
    grad_hidden = torch.empty_like(hidden)
    # A sum over chunks, so stored wider than bfloat16.
    grad_weight = torch.zeros_like(given, dtype=dtype) if ctx.needs_input_grad[1] else None
    for i in range(0, len(hidden), ctx.rows):
        chunk = slice(i, i + ctx.rows)
        read = hidden[chunk].to(weight.dtype)
        logits = softmax.logits(read, weight, dtype)
        derivative = softmax.derivative(logits)
        logprobs = softmax.at(chunk).logprobs(logits) if logprobs_of is None else logprobs_of(chunk, logits)
        del logits
        grad = logits_gradient(chunk, logprobs)
        del logprobs
        grad = softmax.at(chunk).over_temperature(grad)
        if softmax.cap is not None or softmax.scale != 1.0:
            grad = grad.mul_(derivative)
        grad = grad.to(weight.dtype)
        grad_hidden[chunk] = grad @ weight
        if grad_weight is not None and dtype == read.dtype:
            grad_weight.addmm_(grad.T, read)  # without a second tensor of the weight's size
        elif grad_weight is not None:
            grad_weight += grad.T @ read
        del grad, derivative  # before the next chunk's logits are made
    return grad_hidden, None if grad_weight is None else grad_weight.to(given.dtype)


def token_kl(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    softmax: Softmax,
    other_hidden: Tensor,
    other_weight: Tensor,
    other_softmax: Softmax,
    over_other: bool = False,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """KL(p || q) at each token, with p from `hidden` and q from `other_hidden`; or KL(q || p).

    Like log-probabilities, it is computed from hidden states: the logits of both models exist for one chunk of tokens
    at a time, in the backward pass too.

    With z the logits of p divided by its temperature T, and l = log p - log q: d KL(p || q) / dz = p (l - KL), and
    d KL(q || p) / dz = p - q. Only p gets a gradient. The softmax is computed in float32 (float64 where `hidden` is).

    Args:
        hidden: `[N, H]`.
        weight: `[V, H]`.
        targets: `[N]` int64.
        softmax: Map of the products `hidden @ weight.T` to p.
        other_hidden: `[N, H']`.
        other_weight: `[V, H']`.
        other_softmax: Map of the products `other_hidden @ other_weight.T` to q.
        over_other: Compute KL(q || p).
        chunk_elements: Most logits in memory at one time, of both models together, see `chunk_elements_on`.

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
        chunk_elements: int | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        own, other = weight.to(softmax.products_in(hidden)), other_weight.to(other_softmax.products_in(other_hidden))
        kl = hidden.new_empty(targets.shape, dtype=dtype)
        logprobs = torch.empty_like(kl)
        ctx.rows = _tokens_of_chunk(chunk_elements, hidden.device, 2 * len(weight))
        for i in range(0, len(targets), ctx.rows):
            chunk = slice(i, i + ctx.rows)
            log_p = softmax.at(chunk).logprobs(softmax.logits(hidden[chunk], own, dtype))  # [n, V]
            logprobs[chunk] = log_p.gather(1, targets[chunk, None])[:, 0]
            log_q = other_softmax.at(chunk).logprobs(other_softmax.logits(other_hidden[chunk], other, dtype))
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
        other = other_weight.to(ctx.other_softmax.products_in(other_hidden))

        def logits_gradient(chunk: slice, log_p: Tensor) -> Tensor:
            theirs: Softmax = ctx.other_softmax.at(chunk)
            log_q = theirs.logprobs(theirs.logits(other_hidden[chunk], other, kl.dtype))
            if ctx.over_other:
                grad = log_p.exp_().sub_(log_q.exp_())
            else:
                grad = log_q.sub_(log_p).neg_().sub_(kl[chunk, None]).mul_(log_p.exp_())
            return grad.mul_(grads[0][chunk, None])

        return *_gradients(ctx, hidden, weight, kl.dtype, logits_gradient), *[None] * 7
