"""What a language model's output layer is asked beside scores: given tokens, the likeliest, hidden states, divergence.

A readout runs within the output layer's own forward, where ZeRO-3 and FSDP gather its weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.models.divergence import Softmax, token_kl
from rlflow.models.logprobs import TokenHead, logprobs_of_tokens


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
