"""A Hugging Face causal language model that scores tokens: what a strategy trains, and what a handle calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.data.batch import Ragged, TokenRows
from rlflow.errors import UserError
from rlflow.models.attention import PACKED_ATTENTION, register_packed_attention
from rlflow.models.linear import use_onednn
from rlflow.models.logprobs import TokenHead
from rlflow.models.packing import pack


class ScoringModel(nn.Module):
    """A causal language model whose output layer gives log-probabilities and entropies in place of logits.

    Parameters keep their Hugging Face names behind the prefix `causal_lm.`.

    Args:
        causal_lm: The transformers model; its attention, its output layer and how its linear layers compute on the
            CPU are replaced.

    Raises:
        UserError: The output layer has a bias.
    """

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        head = causal_lm.get_output_embeddings()
        if head.bias is not None:
            raise UserError(f"{type(causal_lm).__name__} has a bias in its output layer; use a model without one")
        register_packed_attention()
        causal_lm.set_attn_implementation(PACKED_ATTENTION)
        causal_lm.set_output_embeddings(TokenHead(head.weight))
        use_onednn(causal_lm)
        self.causal_lm = causal_lm

    @classmethod
    def load(
        cls, path: Path, dtype: torch.dtype, device: torch.device, gradient_checkpointing: bool = False
    ) -> ScoringModel:
        """Read a model, and check that it scores as its own forward does. It is in evaluation mode, without dropout.

        Args:
            path: Folder or Hugging Face name.
            dtype: Of the parameters.
            device: Where they are.
            gradient_checkpointing: Keep each layer's input only, and compute the rest again in the backward pass.

        Raises:
            UserError: There is no such model, or it cannot be scored rightly here.
        """
        causal_lm = _read(path, dtype)
        for module in causal_lm.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        causal_lm.to(device).eval()
        probe = _probe(causal_lm.config.vocab_size)
        expected = _own_logprobs(causal_lm, probe)
        model = cls(causal_lm)
        with torch.no_grad():
            found, _ = model(*pack(probe).to(device).arguments())
        _refuse_unlike(found, expected, dtype, type(causal_lm).__name__)
        if gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int,
        scored: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """`[R]` log-probabilities and `[R]` entropies of the scored tokens of a `ModelInput`.

        Its parts come one by one, because DeepSpeed looks for tensors among the arguments and not inside them.
        """
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
        scores: tuple[Tensor, Tensor] = head(hidden.flatten(0, 1)[scored], targets, temperature)
        return scores

    @staticmethod
    def hf_name(name: str) -> str:
        """The Hugging Face name of a parameter of this module."""
        return name.removeprefix("causal_lm.")

    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor]) -> None:
        """Write configuration and weights in Hugging Face form; transformers does so on rank 0 of a process group only.

        Args:
            folder: Where to write.
            state_dict: Full tensors by Hugging Face name.
        """
        self.causal_lm.save_pretrained(folder, state_dict=state_dict)


def _read(path: Path, dtype: torch.dtype) -> Any:
    """The transformers model with eager attention, which is transformers' own reference."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise UserError(f"`model` {str(path)!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    causal_lm, report = loaded
    if report["missing_keys"]:
        # Transformers would go on with random numbers in their place.
        first = min(report["missing_keys"])
        raise UserError(
            f"`model` {str(path)!r} lacks {len(report['missing_keys'])} weights, {first!r} the first of them"
        )
    return causal_lm


def _probe(vocabulary: int) -> TokenRows:
    """Two short rows of tokens from all over the vocabulary."""
    tokens = torch.randint(vocabulary, (20,), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([6, 8])
    responses = tokens[4:].view(2, 8) * (torch.arange(8) < lengths[:, None])
    return TokenRows(Ragged(tokens[:4], torch.tensor([3, 1])), responses, lengths)


@torch.no_grad()
def _own_logprobs(causal_lm: Any, rows: TokenRows) -> Tensor:
    """`[R]` log-probabilities by the model's own forward, one row after another."""
    found = []
    for prompt, response, length in zip(rows.prompt_ids.rows(), rows.response_ids, rows.lengths, strict=True):
        tokens = torch.cat([prompt, response[:length]]).to(causal_lm.device)
        logits = causal_lm(input_ids=tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        found.append(logprobs.gather(1, tokens[len(prompt) :, None])[:, 0])
    return torch.cat(found)


def _refuse_unlike(found: Tensor, expected: Tensor, dtype: torch.dtype, name: str) -> None:
    """Scaled or capped logits, attention of its own or a state that runs on show as another log-probability."""
    allowed = 1e-3 if dtype in (torch.float32, torch.float64) else 0.25
    difference = float((found - expected).abs().mean())
    if not difference <= allowed:
        raise UserError(
            f"{name} cannot be scored here: its own forward and the packed one differ by {difference:.2g} per token "
            f"(allowed {allowed}); use a model with plain causal attention and plain logits"
        )
