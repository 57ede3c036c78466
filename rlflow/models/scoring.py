"""A Hugging Face causal language model that scores tokens, its output layer, and its weights as files have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.models.logprobs import Softmax, token_logprobs
from rlflow.models.lora import in_buckets
from rlflow.models.moe import Routing
from rlflow.models.packed import PackedModel


class ScoringModel(PackedModel):
    """A causal language model whose output layer gives log-probabilities and entropies in place of logits.

    Args:
        causal_lm: The transformers model; its output layer has no bias.
    """

    def __init__(self, causal_lm: Any) -> None:
        head = causal_lm.get_output_embeddings()
        assert head.bias is None  # see `check_architecture`
        causal_lm.set_output_embeddings(TokenHead(head.weight, Softmax.of(causal_lm.config)))
        super().__init__(causal_lm)

    @property
    def decoder(self) -> Any:
        """See `PackedModel.decoder`."""
        return self.model.get_decoder()

    @property
    def output_layer(self) -> Any:
        """See `PackedModel.output_layer`."""
        return self.model.get_output_embeddings()

    def use_float32_head(self) -> None:
        """See `PackedModel.use_float32_head`."""
        self.output_layer.softmax = replace(self.output_layer.softmax, wide=True)

    def own_scores(self, forward: nn.Module, tokens: Tensor, prompt: int) -> Tensor:
        """Log-probabilities of the tokens after the prompt; see `PackedModel.own_scores`."""
        logits: Tensor = forward(tokens[None])[0, prompt - 1 : -1]
        logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        return logprobs.gather(1, tokens[prompt:, None])[:, 0]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int,
        scored: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        readout: Readout | None = None,
        beside: Tensor | None = None,
        routing: Routing | None = None,
    ) -> tuple[Tensor, ...]:
        """`[R]` log-probabilities and `[R]` entropies of the scored tokens of a `ModelInput`, or a readout's."""
        hidden = self.hidden(input_ids, position_ids, cu_seqlens, max_seqlen, scored, routing)
        scores: tuple[Tensor, ...] = self.output_layer(hidden, targets, temperature, readout, beside)
        return scores


# What an output layer computes of hidden states within its own forward, where ZeRO-3 and FSDP gather its weight: values
# `[N, ...]` of the states `[N, H]`, the layer's weight `[V, H]`, the targets `[N]`, the layer's softmax, and what lies
# beside each target, `[N, ...]` or None.
Readout = Callable[[Tensor, Tensor, Tensor, Softmax, Tensor | None], tuple[Tensor, ...]]


class TokenHead(nn.Module):
    """A model's output layer that returns log-probabilities and entropy in place of logits.

    It holds the layer's own weight, tied or not, and does its work within its own forward: there ZeRO-3 gathers it.

    Args:
        weight: `[V, H]`, the weight of the layer that it replaces.
        softmax: What the model makes of its products; the temperature is that of each forward.
    """

    def __init__(self, weight: nn.Parameter, softmax: Softmax) -> None:
        super().__init__()
        self.weight = weight
        self.softmax = softmax

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
        softmax = replace(self.softmax, temperature=temperature)
        if readout is not None:
            return readout(hidden, self.weight, targets, softmax, beside)
        return token_logprobs(hidden, self.weight, targets, softmax)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., H]` hidden states to the products `[..., V]` of the layer that this replaces."""
        return nn.functional.linear(hidden, self.weight)


def stored_weights(
    path: Path, dtype: torch.dtype, bucket_bytes: int, trust_remote_code: bool = False
) -> Iterator[list[tuple[str, Tensor]]]:
    """Full tensors on the CPU by Hugging Face name; tied ones come once. The model is held whole meanwhile.

    Args:
        path: A folder in Hugging Face form, or a Hugging Face name.
        dtype: Dtype of the tensors.
        bucket_bytes: A bucket holds at most this, or one larger tensor.
        trust_remote_code: Whether code that lies beside the weights may run.
    """
    model = ScoringModel.load(path, dtype, torch.device("cpu"), trust_remote_code=trust_remote_code)
    for bucket in in_buckets(model.weights(), lambda weight: weight.parameter.nbytes, bucket_bytes):
        yield [(weight.name, weight.parameter.detach()) for weight in bucket]
