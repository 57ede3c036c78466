"""What a language model says of rows: log-probabilities, entropy, the likeliest tokens, hidden states, divergence.

A readout runs within the output layer's own forward, where ZeRO-3 and FSDP gather its weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.models.logprobs import (
    CHUNK_ELEMENTS,
    PLAIN,
    LogitShape,
    TokenHead,
    add_product,
    log_softmax,
    logprobs_of_tokens,
)
from rlflow.models.packing import Scorable, no_rows, response_mask, take, whole
from rlflow.models.routed_handle import RoutedHandle
from rlflow.values.batch import TokenRows
from rlflow.values.cuts import PerSample, PerToken
from rlflow.values.host_copy import rows_at
from rlflow.values.ragged import Ragged


def _ignore(rows: Scorable, logprobs: Tensor) -> None:
    """Nobody watches."""


class LanguageScores(RoutedHandle):
    """The methods of a language model that score. Each is a collective of the role's ranks.

    Attributes:
        temperature: Divides the logits.
        watch: Called with the log-probabilities of all responses that are scored, after their rows.
    """

    temperature: float
    watch: Callable[[Scorable, Tensor], None] = staticmethod(_ignore)

    def score(self, rows: Scorable) -> tuple[PerToken, PerToken]:
        """Log-probability of each response token, and entropy of the distribution that it was drawn from.

        Args:
            rows: A `Batch`, a `Rollout`, or anything with their `prompt_ids`, `response_ids` and `lengths`.

        Returns:
            `[B, T]` each, in float32 (float64 where the model is), 0 where padded.
        """
        logprobs, entropy = self._scores(rows, self.temperature)
        self.watch(rows, logprobs)
        return logprobs, entropy

    def logprobs(self, rows: Scorable) -> PerToken:
        """The first of `score`."""
        return self.score(rows)[0]

    def entropy(self, rows: Scorable) -> PerToken:
        """The second of `score`."""
        return self.score(rows)[1]

    def logprobs_of(self, rows: Scorable, ids: Tensor) -> Tensor:
        """Log-probabilities of given tokens where each response token stands.

        Args:
            rows: A `Batch`, a `Rollout`, or anything with their `prompt_ids`, `response_ids` and `lengths`.
            ids: `[B, T, K]` int64, tokens of the vocabulary; what stands where responses are padded is not read.

        Returns:
            `[B, T, K]`, in float32 (float64 where the model is), 0 where padded.
        """
        if ids.dim() != 3 or ids.shape[:2] != rows.response_ids.shape:
            raise UserError(
                f"`logprobs_of` was given tokens {list(ids.shape)} for responses {list(rows.response_ids.shape)}; give"
                " K tokens for each response token, [B, T, K]"
            )
        return self._of_tokens(rows, OfTokens(), ids)[0]

    def topk(self, rows: Scorable, k: int) -> tuple[Tensor, Tensor]:
        """The `k` likeliest tokens where each response token stands, the likeliest first.

        Args:
            rows: As of `logprobs_of`.
            k: From 1 to the size of the vocabulary.

        Returns:
            `[B, T, k]` log-probabilities, with gradients within training, and `[B, T, k]` int64 tokens; 0 where padded.
        """
        if k < 1:
            raise UserError(f"`topk` was asked for {k} tokens; ask for 1 or more")
        logprobs, tokens = self._of_tokens(rows, OfTokens(top=k))
        return logprobs, tokens

    def hidden(self, rows: Scorable) -> PerSample:
        """What the output layer reads at the last token of each row; at the prompt's last where there is no response.

        Args:
            rows: As of `logprobs_of`.

        Returns:
            `[B, H]` in float32 (float64 where the model is).
        """
        (states_there,) = self._scores(whole(rows), self.temperature, states)
        return states_there[:, 0]

    def kl(
        self,
        rows: Scorable,
        other: LanguageScores,
        given: Ragged | None = None,
        over: Literal["self", "other"] = "self",
    ) -> PerToken:
        """The Kullback-Leibler divergence from a frozen model, over the whole vocabulary, at each response token.

        By default it is KL(self || other), the sum of p log(p / q) with p this model's distribution and q that of
        `other`: what distillation calls reverse KL where this model is the student (MiniLLM, arXiv 2306.08543; GKD,
        arXiv 2306.13649). The logits of each model are divided by its own temperature. In a train node, name `other`
        in the mark's `uses`, and read `given` as a value of its own, `Ragged`.

        Args:
            rows: As of `logprobs_of`.
            other: A frozen model of the same vocabulary on the same ranks; no gradient goes to it.
            given: Other prompts, one a row, after which `other` reads the same responses; None for those of `rows`.
            over: Whose distribution the sum is weighted by: `other` gives KL(other || self), forward KL.

        Returns:
            `[B, T]` in nats, in float32 (float64 where the model is), 0 where padded.

        Raises:
            UserError: `other` is trained, has another vocabulary, or `given` is of other rows.
        """
        self._check_kl(rows, other, given, over)

        def divergence(part: Tensor | None) -> tuple[Tensor, ...]:
            own: Scorable = rows if part is None else take(rows, part)
            prompts = own.prompt_ids if given is None else given if part is None else given.take(part)
            layer = FrozenLayer(other.plan.gathers)
            with torch.no_grad():
                of_other = TokenRows(prompts, own.response_ids, own.lengths)
                _, (beside,) = other._forward_once(of_other, other.temperature, layer)
            return self._score_once(own, self.temperature, Divergence(layer, over == "other"), beside=beside)

        kl, logprobs = self._by_micro_batch(rows, divergence, () if given is None else (given,))
        self.watch(rows, logprobs)
        return kl

    def _check_kl(self, rows: Scorable, other: LanguageScores, given: Ragged | None, over: str) -> None:
        if other.trainable:
            raise UserError(
                f"`kl` to {other.model!r}, which is trained: no gradient would go to it; give a frozen model, as"
                f" CausalLM({other.model!r}, trainable=False) or `averaged`"
            )
        if over not in ("self", "other"):
            raise UserError(f"`over` of `kl` is {over!r}; it is 'self' or 'other'")
        if given is not None and len(given) != len(rows.lengths):
            raise UserError(f"`kl` was given {len(given)} other prompts for {len(rows.lengths)} rows; give one a row")

    def _of_tokens(self, rows: Scorable, readout: OfTokens, ids: Tensor | None = None) -> tuple[Tensor, ...]:
        def of_part(part: Tensor | None) -> tuple[Tensor, ...]:
            own: Scorable = rows if part is None else take(rows, part)
            if ids is None:
                return self._score_once(own, self.temperature, readout)
            asked = ids if part is None else rows_at(ids, part)
            places = response_mask(own).flatten().nonzero().flatten()  # counted on the host: no device is waited for
            return self._score_once(own, self.temperature, readout, beside=rows_at(asked.flatten(0, 1), places))

        logprobs, *found = self._by_micro_batch(rows, of_part)
        self.watch(rows, logprobs)
        return tuple(found)

    def score_nothing(self) -> Tensor:
        """See `ModelHandle.score_nothing`."""
        return self._scores(no_rows(), self.temperature)[0].sum()


@dataclass(frozen=True)
class OfTokens:
    """Log-probabilities of the response token, of the tokens `beside` `[R, K]`, and of the likeliest ones.

    Attributes:
        top: How many of the likeliest.
    """

    top: int = 0

    def __call__(
        self, layer: TokenHead, hidden: Tensor, targets: Tensor, temperature: float, beside: Tensor | None
    ) -> tuple[Tensor, ...]:
        """`[R]` of the response tokens, `[R, K + top]` of the others, and these tokens `[R, K + top]`."""
        ids = targets[:, None] if beside is None else torch.cat([targets[:, None], beside], 1)
        if self.top > (size := len(layer.weight)):
            raise UserError(f"`topk` was asked for {self.top} tokens of a vocabulary of {size}; ask for fewer")
        logprobs, _, tokens = logprobs_of_tokens(
            hidden, layer.weight, ids, temperature, self.top, shape=layer.shape, wide=layer.wide
        )
        return logprobs[:, 0], logprobs[:, 1:], tokens[:, 1:]


def states(
    layer: TokenHead, hidden: Tensor, targets: Tensor, temperature: float, beside: Tensor | None
) -> tuple[Tensor, ...]:
    """`[R, H]`, what the layer reads, in float32 at least; its weight gets a gradient of 0, so that it has one."""
    return (hidden.to(torch.promote_types(hidden.dtype, torch.float32)) + 0.0 * layer.weight[0, 0],)


@dataclass
class FrozenLayer:
    """The states that the output layer of a frozen model reads, and the layer itself, to be compared with another's.

    Attributes:
        gathers: Whether the layer's weight is whole only while its forward runs, so that it is copied.
        weight: `[V, H]`, once the forward pass ran.
        softmax: How its products become a distribution, once the forward pass ran.
    """

    gathers: bool
    weight: Tensor | None = None
    softmax: Softmax | None = None

    def __call__(
        self, layer: TokenHead, hidden: Tensor, targets: Tensor, temperature: float, beside: Tensor | None
    ) -> tuple[Tensor, ...]:
        """`[R, H]`, in the model's dtype."""
        weight = layer.weight.detach()
        self.weight = weight.clone() if self.gathers else weight
        self.softmax = Softmax(temperature, layer.shape, layer.wide)
        return (hidden,)


@dataclass(frozen=True)
class Divergence:
    """The Kullback-Leibler divergence from the distribution of a frozen model, whose states are `beside` `[R, H]`.

    Attributes:
        other: The frozen model's output layer.
        over_other: Whether it is KL(other || self) and not KL(self || other).
    """

    other: FrozenLayer
    over_other: bool = False

    def __call__(
        self, layer: TokenHead, hidden: Tensor, targets: Tensor, temperature: float, beside: Tensor | None
    ) -> tuple[Tensor, ...]:
        """`[R]` divergences, and `[R]` log-probabilities of the response tokens, without a gradient."""
        weight, softmax = self.other.weight, self.other.softmax
        assert beside is not None
        assert weight is not None
        assert softmax is not None
        if len(weight) != len(layer.weight):
            raise UserError(
                f"`kl` compares models with output layers of {len(layer.weight)} and {len(weight)} tokens, and a token"
                " of one has to be a token of the other; give models of one vocabulary"
            )
        own = Softmax(temperature, layer.shape, layer.wide)
        return token_kl(hidden, layer.weight, targets, own, beside, weight, softmax, self.over_other)


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

    Like log-probabilities (`rlflow.models.logprobs`), it is computed from hidden states: the logits of both models
    exist for one chunk of tokens at a time, in the backward pass as in the forward.

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
