"""A Hugging Face causal language model that scores tokens: what a strategy trains, and what a handle calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.errors import UserError
from rlflow.models.attention import PACKED_ATTENTION, register_packed_attention
from rlflow.models.logprobs import TokenHead


class ScoringModel(nn.Module):
    """Wraps a causal language model whose output layer gives log-probabilities and entropy in place of logits.

    Parameters keep their Hugging Face names behind the prefix `causal_lm.`.

    Args:
        causal_lm: The transformers model; its output layer is replaced.
    """

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        head = causal_lm.get_output_embeddings()
        if head.bias is not None:
            raise UserError(f"{type(causal_lm).__name__} has a bias in its output layer, which is not supported")
        causal_lm.set_output_embeddings(TokenHead(head.weight))
        self.causal_lm = causal_lm

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype, gradient_checkpointing: bool = False) -> ScoringModel:
        """Read a model, on the CPU, in evaluation mode and with its dropout off.

        Args:
            path: Folder or Hugging Face name.
            dtype: Of the parameters.
            gradient_checkpointing: Keep only each layer's input, and compute the rest again in the backward pass.

        Raises:
            UserError: There is no such model, or it cannot be scored rightly here.
        """
        from transformers import AutoModelForCausalLM

        register_packed_attention()
        try:
            causal_lm = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=PACKED_ATTENTION)
        except (OSError, ValueError) as error:
            raise UserError(f"`model` {str(path)!r} cannot be loaded: {str(error).splitlines()[0]}") from error
        for module in causal_lm.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        return cls(causal_lm).eval()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int,
        scored: Tensor,
        targets: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, `[R]` each, of the tokens that `ModelInput` names; its fields in order."""
        hidden = self.causal_lm.get_decoder()(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
            max_length_q=max_seqlen,
            max_length_k=max_seqlen,
        ).last_hidden_state
        head = self.causal_lm.get_output_embeddings()
        result: tuple[Tensor, Tensor] = head(hidden.flatten(0, 1)[scored], targets, temperature)
        return result

    @staticmethod
    def hf_name(name: str) -> str:
        """The Hugging Face name of a parameter of this module."""
        return name.removeprefix("causal_lm.")

    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor]) -> None:
        """Write configuration and weights in Hugging Face form.

        Args:
            folder: Where to write.
            state_dict: Full tensors by Hugging Face name.
        """
        self.causal_lm.save_pretrained(folder, state_dict=state_dict)
