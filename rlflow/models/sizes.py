"""How large a model is: from its config.json, or from a table of models whose config need not be fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlflow.errors import UserError, did_you_mean, one_line


@dataclass(frozen=True)
class ModelSize:
    """A decoder of the Llama family: gated feed-forward layers, grouped queries, norms without bias.

    Attributes:
        hidden: Width.
        intermediate: Width inside the feed-forward layers.
        layers: How many.
        heads: Query heads.
        kv_heads: Key and value heads.
        vocabulary: Tokens.
        tied: Whether input and output embedding are one.
        head_dim: Width of a head; None for `hidden / heads`.
        bias: Whether queries, keys and values have one.
        labels: Outputs of the output layer where they are not the vocabulary; such a layer is never tied.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    head_dim: int | None = None
    bias: bool = False
    labels: int | None = None

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """All of them, embeddings included."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys + self.bias * (queries + 2 * keys)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.hidden + self.embedding + self.output_layer

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding."""
        return self.vocabulary * self.hidden

    @property
    def outputs(self) -> int:
        """Numbers that the output layer gives for a token."""
        return self.vocabulary if self.labels is None else self.labels

    @property
    def output_layer(self) -> int:
        """Parameters of the output layer; none where it is the input embedding."""
        return 0 if self.tied else self.outputs * self.hidden

    @property
    def largest_layer(self) -> int:
        """Parameters of a layer, or of an embedding where that has more."""
        layer = (self.parameters - self.embedding - self.output_layer) // self.layers
        return max(self.embedding, layer)

    def with_labels(self, labels: int) -> ModelSize:
        """With an output layer of so many labels instead of the vocabulary's."""
        return replace(self, labels=labels, tied=False)

    @property
    def multiplied(self) -> int:
        """Parameters that each token is multiplied with: all but the input embedding, which is looked up."""
        return self.parameters - (0 if self.tied else self.embedding)

    def cache_bytes(self, width: int) -> int:
        """Of one token's keys and values, of `width` bytes each number."""
        return 2 * self.layers * self.kv_heads * self.head_width * width

    def adapters(self, rank: int) -> int:
        """Parameters of LoRA adapters on every linear layer but the output."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        ends = 2 * (self.hidden + queries) + 2 * (self.hidden + keys) + 3 * (self.hidden + self.intermediate)
        return self.layers * rank * ends


# From the config.json of each, at huggingface.co.
KNOWN: dict[str, ModelSize] = {
    "tiny": ModelSize(128, 384, 2, 4, 2, 128, tied=True, bias=True),
    "Qwen/Qwen2.5-0.5B": ModelSize(896, 4864, 24, 14, 2, 151_936, tied=True, bias=True),
    "Qwen/Qwen2.5-1.5B": ModelSize(1536, 8960, 28, 12, 2, 151_936, tied=True, bias=True),
    "Qwen/Qwen2.5-3B": ModelSize(2048, 11_008, 36, 16, 2, 151_936, tied=True, bias=True),
    "Qwen/Qwen2.5-7B": ModelSize(3584, 18_944, 28, 28, 4, 152_064, bias=True),
    "Qwen/Qwen2.5-14B": ModelSize(5120, 13_824, 48, 40, 8, 152_064, bias=True),
    "Qwen/Qwen2.5-32B": ModelSize(5120, 27_648, 64, 40, 8, 152_064, bias=True),
    "Qwen/Qwen2.5-72B": ModelSize(8192, 29_568, 80, 64, 8, 152_064, bias=True),
    "Qwen/Qwen3-8B": ModelSize(4096, 12_288, 36, 32, 8, 151_936, head_dim=128),
    "meta-llama/Llama-3.1-8B": ModelSize(4096, 14_336, 32, 32, 8, 128_256),
    "meta-llama/Llama-3.1-70B": ModelSize(8192, 28_672, 80, 64, 8, 128_256),
}


def size_of(model: str) -> ModelSize:
    """The size of a folder's model, of one in the table, or of one whose config can be fetched.

    Raises:
        UserError: None of these.
    """
    name = model.removesuffix("-Instruct")
    if name in KNOWN:
        return KNOWN[name]
    config = Path(model) / "config.json"
    if config.is_file():
        return _read(model, json.loads(config.read_text()))
    if Path(model).exists() or model.count("/") != 1:
        near = did_you_mean(model, KNOWN)
        raise UserError(
            f"`model` is {model!r}, where no config.json says how large it is; give a model's folder, a name of the"
            f" hub, or one of {', '.join(KNOWN)}.{near}"
        )
    try:
        from transformers import AutoConfig

        return _read(model, AutoConfig.from_pretrained(model, trust_remote_code=False).to_dict())
    except (OSError, ValueError) as error:
        raise UserError(
            f"`model` is {model!r}, whose size is not in the table, and its config cannot be had"
            f" ({one_line(error)[:120]}); give a folder with its config.json"
        ) from error


def experts(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """The name and value of the setting that makes a model a mixture of experts, by its config.json; None if none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next(((name, count) for name in names if (count := config.get(name) or 1) > 1), None)


def _read(model: str, config: Mapping[str, Any]) -> ModelSize:
    if experts(config) is not None:
        raise UserError(f"`model` is {model!r}, a mixture of experts, whose size is not known from its config")
    try:
        return ModelSize(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            head_dim=config.get("head_dim"),
            bias=bool(config.get("attention_bias", config.get("model_type") == "qwen2")),
        )
    except KeyError as error:
        raise UserError(
            f"`model` is {model!r}, whose config does not say {error}; only decoders of the Llama family are known"
        ) from error
