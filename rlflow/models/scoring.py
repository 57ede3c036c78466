"""A Hugging Face causal language model that scores tokens, and its weights as files have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.models.logprobs import LogitShape, Readout, TokenHead
from rlflow.models.packed import PackedModel
from rlflow.models.pretrained import read


class ScoringModel(PackedModel):
    """A causal language model whose output layer gives log-probabilities and entropies in place of logits.

    Args:
        causal_lm: The transformers model; its output layer has no bias.
    """

    def __init__(self, causal_lm: Any) -> None:
        head = causal_lm.get_output_embeddings()
        assert head.bias is None  # see `check_architecture`
        causal_lm.set_output_embeddings(TokenHead(head.weight, LogitShape.of(causal_lm.config)))
        super().__init__(causal_lm)

    @classmethod
    def load(
        cls,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        gradient_checkpointing: bool = False,
        empty: bool = False,
        trust_remote_code: bool = False,
    ) -> ScoringModel:
        """Read a model; `check` says whether it is scored rightly. It is in evaluation mode, without dropout.

        Args:
            path: Folder or Hugging Face name.
            dtype: Of the parameters.
            device: Where they are.
            gradient_checkpointing: Keep each layer's input only, and compute the rest again in the backward pass.
            empty: See `ModelHandle.load`.
            trust_remote_code: See `ModelHandle`.

        Raises:
            UserError: There is no such model.
        """
        from transformers import AutoModelForCausalLM

        causal_lm, files, _, unknown = read(AutoModelForCausalLM, path, dtype, empty, trust_remote_code)
        if not empty:
            causal_lm.to(device)
        if gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        model = cls(causal_lm)
        model.files, model.unknown = files, unknown
        return model

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
        self.output_layer.wide = True

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
    ) -> tuple[Tensor, ...]:
        """`[R]` log-probabilities and `[R]` entropies of the scored tokens of a `ModelInput`, or a readout's."""
        hidden = self.hidden(input_ids, position_ids, cu_seqlens, max_seqlen, scored)
        scores: tuple[Tensor, ...] = self.output_layer(hidden, targets, temperature, readout, beside)
        return scores


def stored_weights(
    path: Path, dtype: torch.dtype, bucket_bytes: int, trust_remote_code: bool = False
) -> Iterator[list[tuple[str, Tensor]]]:
    """Full tensors on the CPU by Hugging Face name; tied ones come once. The model is held whole meanwhile.

    Args:
        path: A folder in Hugging Face form, or a Hugging Face name.
        dtype: Of the tensors.
        bucket_bytes: A bucket holds at most this, or one larger tensor.
        trust_remote_code: Whether code that lies beside the weights may run.
    """
    model = ScoringModel.load(path, dtype, torch.device("cpu"), trust_remote_code=trust_remote_code)
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for weight in model.weights():
        tensor = weight.parameter.detach()
        if bucket and held + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append((weight.name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket
