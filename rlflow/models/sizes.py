"""The size of a model, from its config.json, or from a table of known models, for which no config is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlflow.errors import UserError, did_you_mean, one_line
from rlflow.models.mixers import state_size
from rlflow.models.picture_processor import FAMILIES, QWEN


@dataclass(frozen=True)
class ModelSize:
    """A decoder, as those of the Llama family are unless an attribute differs: grouped queries, norms without bias.

    Attributes:
        hidden: Width of the hidden states.
        intermediate: Width inside the feed-forward layers; in a mixture of experts, inside each expert.
        layers: Number of layers.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        vocabulary: Number of tokens in the vocabulary.
        tied: Whether input and output embedding are one.
        head_dim: Width of a head; None for `hidden / heads`.
        bias: Whether queries, keys and values have a bias.
        labels: Number of outputs of the output layer where it is not over the vocabulary; such a layer is never tied.
        experts: Number of experts in each layer of a mixture of experts; 0 for other models.
        experts_per_token: Number of experts that a token goes to.
        qk_norm: Whether the queries and keys of a head are normed.
        sinks: Whether there are attention sinks, and biases of attention's output, experts and routers, as in GPT-OSS.
        others: Parameters of the model beyond those of such a decoder, for layers of other kinds; may be negative.
        attending: Number of layers with keys and values; None for all.
        state: Numbers that the other layers store for a row, however long it is.
        tower: Parameters by which pictures are read; no token of text is multiplied with them.
        patches: Patches of a picture that become one token; 0 without a tower.
        tower_width: Widths of the tower's layers, added up.
        tower_kept: Numbers that the tower's layers keep of a patch for the backward pass.
        norms: Norms of hidden states in each layer.
        rms: Whether these are RMS norms, which transformers computes in float32; torch's own norms are in the weights'
            dtype.
        gated: Whether one of two factors within a feed-forward layer is a gate.
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
    experts: int = 0
    experts_per_token: int = 0
    qk_norm: bool = False
    sinks: bool = False
    others: int = 0
    attending: int | None = None
    state: int = 0
    tower: int = 0
    patches: int = 0
    tower_width: int = 0
    tower_kept: int = 0
    norms: int = 2
    rms: bool = True
    gated: bool = True

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """All parameters, embeddings included."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys + self.bias * (queries + 2 * keys)
        attention += self.qk_norm * 2 * self.head_width + self.sinks * (self.hidden + self.heads)
        router = self.experts * (self.hidden + self.sinks)
        layer = attention + (self.experts or 1) * self.expert + router + 2 * self.hidden
        return self.layers * layer + self.hidden + self.embedding + self.output_layer + self.others + self.tower

    @property
    def expert(self) -> int:
        """Parameters of one expert of one layer, or of a layer's one feed-forward network."""
        return (2 + self.gated) * self.hidden * self.intermediate + self.sinks * (2 * self.intermediate + self.hidden)

    @property
    def active(self) -> int:
        """Parameters that take part when one token is computed: all except the experts that it does not go to."""
        return self.touched(1)

    def touched(self, tokens: float) -> int:
        """Parameters that take part when `tokens` tokens are computed together, each with random experts."""
        missed = self.experts * (1 - self.experts_per_token / self.experts) ** tokens if self.experts else 0.0
        return self.parameters - round(self.layers * missed * self.expert)

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
        return max(self.embedding, self.layer)

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        return (self.parameters - self.tower - self.embedding - self.output_layer) // self.layers

    def with_labels(self, labels: int) -> ModelSize:
        """The size with an output layer of `labels` outputs instead of one over the vocabulary."""
        return replace(self, labels=labels, tied=False)

    @property
    def multiplied(self) -> int:
        """Parameters that a token is multiplied with: the active ones without an untied input embedding and a tower."""
        return self.active - self.tower - (0 if self.tied else self.embedding)

    def cache_bytes(self, width: int) -> int:
        """Bytes of one token's keys and values, with `width` bytes for each number."""
        layers = self.layers if self.attending is None else self.attending
        return 2 * layers * self.kv_heads * self.head_width * width

    @property
    def state_bytes(self) -> int:
        """Bytes of a row's states, in float32."""
        return 4 * self.state

    def adapters(self, rank: int) -> int:
        """Parameters of LoRA adapters on every linear layer but the output; experts and routers have none.

        Layers that carry a state count as layers of attention.
        """
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        feed_forward = 0 if self.experts else (2 + self.gated) * (self.hidden + self.intermediate)
        return self.layers * rank * (2 * (self.hidden + queries) + 2 * (self.hidden + keys) + feed_forward)


# Sizes from the config.json of each model at huggingface.co.
KNOWN: dict[str, ModelSize] = {
    "tiny": ModelSize(128, 384, 2, 4, 2, 128, tied=True, bias=True),
    "tiny_bpe": ModelSize(128, 384, 2, 4, 2, 2048, tied=True, bias=True),
    "tiny_moe": ModelSize(128, 96, 2, 4, 2, 128, tied=True, experts=8, experts_per_token=2, qk_norm=True),
    "tiny_vision": ModelSize(64, 192, 2, 2, 2, 128, tower=113_920, patches=4, tower_width=128, tower_kept=1_536),
    "Qwen/Qwen2.5-0.5B": ModelSize(896, 4864, 24, 14, 2, 151_936, tied=True, bias=True),
    "Qwen/Qwen2.5-1.5B": ModelSize(1536, 8960, 28, 12, 2, 151_936, tied=True, bias=True),
    "Qwen/Qwen2.5-3B": ModelSize(2048, 11_008, 36, 16, 2, 151_936, tied=True, bias=True),
    "Qwen/Qwen2.5-7B": ModelSize(3584, 18_944, 28, 28, 4, 152_064, bias=True),
    "Qwen/Qwen2.5-14B": ModelSize(5120, 13_824, 48, 40, 8, 152_064, bias=True),
    "Qwen/Qwen2.5-32B": ModelSize(5120, 27_648, 64, 40, 8, 152_064, bias=True),
    "Qwen/Qwen2.5-72B": ModelSize(8192, 29_568, 80, 64, 8, 152_064, bias=True),
    "Qwen/Qwen3-0.6B": ModelSize(1024, 3072, 28, 16, 8, 151_936, tied=True, head_dim=128, qk_norm=True),
    "Qwen/Qwen3.5-0.8B": ModelSize(
        1024,
        3584,
        24,
        8,
        2,
        248_320,
        tied=True,
        head_dim=256,
        qk_norm=True,
        others=107_980_608,
        attending=6,
        state=5_160_960,
        tower=100_592_896,
        patches=4,
        tower_width=9_216,
        tower_kept=193_536,
    ),
    "Qwen/Qwen3-VL-8B": ModelSize(
        4096,
        12_288,
        36,
        32,
        8,
        151_936,
        head_dim=128,
        qk_norm=True,
        tower=576_388_336,
        patches=4,
        tower_width=31_104,
        tower_kept=636_768,
    ),
    "Qwen/Qwen3-8B": ModelSize(4096, 12_288, 36, 32, 8, 151_936, head_dim=128, qk_norm=True),
    "Qwen/Qwen3-30B-A3B": ModelSize(
        2048, 768, 48, 32, 4, 151_936, head_dim=128, experts=128, experts_per_token=8, qk_norm=True
    ),
    "Qwen/Qwen3-235B-A22B": ModelSize(
        4096, 1536, 94, 64, 4, 151_936, head_dim=128, experts=128, experts_per_token=8, qk_norm=True
    ),
    "mistralai/Mixtral-8x7B-v0.1": ModelSize(4096, 14_336, 32, 32, 8, 32_000, experts=8, experts_per_token=2),
    "openai/gpt-oss-20b": ModelSize(
        2880, 2880, 24, 64, 8, 201_088, head_dim=64, bias=True, experts=32, experts_per_token=4, sinks=True
    ),
    "meta-llama/Llama-3.1-8B": ModelSize(4096, 14_336, 32, 32, 8, 128_256),
    "meta-llama/Llama-3.1-70B": ModelSize(8192, 28_672, 80, 64, 8, 128_256),
}


def size_of(model: str, trust_remote_code: bool = False) -> ModelSize:
    """The size of a model that is in the table, in a folder, or has a config that can be downloaded.

    Args:
        model: A folder, also the folder of a run, or a Hugging Face name.
        trust_remote_code: Whether code of a model on the hub may run, to read its config.

    Raises:
        UserError: The size is not known in any of these ways.
    """
    name = model.removesuffix("-Instruct")
    if name in KNOWN:
        return KNOWN[name]
    of_run = Path(model) / "model"
    config = Path(model) / "config.json"
    if not config.is_file() and (of_run / "config.json").is_file():  # the folder of a run
        return size_of(str(of_run), trust_remote_code)
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

        return _read(model, AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code).to_dict())
    except (OSError, ValueError) as error:
        raise UserError(
            f"`model` is {model!r}, whose size is not in the table, and its config cannot be had"
            f" ({one_line(error)[:120]}); give a folder with its config.json"
        ) from error


def experts(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """Name and value of the setting in a config.json that gives the number of experts; None if there is no such."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next(((name, count) for name in names if (count := config.get(name) or 1) > 1), None)


# Types of mixtures of experts whose size is known, and the key in their configs for the width inside an expert.
EXPERT_WIDTH = {
    "gpt_oss": "intermediate_size",
    "granitemoehybrid": "intermediate_size",
    "mixtral": "intermediate_size",
    "qwen3_5_moe_text": "moe_intermediate_size",
    "qwen3_moe": "moe_intermediate_size",
    "qwen3_next": "moe_intermediate_size",
}


def _read(model: str, config: Mapping[str, Any]) -> ModelSize:
    kind = config.get("model_type")
    if kind in FAMILIES:
        return _with_tower(model)
    found = experts(config)
    if kind == "nemotron_h":
        raise UserError(
            f"`model` is {model!r}, of the type 'nemotron_h', whose layers are of four kinds; its size is not known"
            " from its config; to simulate it, give a model of about its size"
        )
    dense = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
    if found is not None and (kind not in EXPERT_WIDTH or dense):
        raise UserError(
            f"`model` is {model!r}, a mixture of experts ({found[0]} {found[1]}) of the type {kind!r}"
            f"{' with layers that have none' if dense else ''}, whose size is not known from its config; known are"
            f" {', '.join(EXPERT_WIDTH)} with experts in every layer. To simulate it, give one of about its size"
        )
    try:
        size = ModelSize(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size" if found is None else EXPERT_WIDTH[str(kind)]],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            vocabulary=config["vocab_size"],
            tied=bool(config["tie_word_embeddings"] if "tie_word_embeddings" in config else _tied_by_itself(kind)),
            head_dim=config.get("head_dim"),
            bias=bool(config.get("attention_bias", kind in ("qwen2", "gpt_oss"))),
            experts=0 if found is None else found[1],
            experts_per_token=0 if found is None else config["num_experts_per_tok"],
            sinks=kind == "gpt_oss",
        )
    except KeyError as error:
        raise UserError(
            f"`model` is {model!r}, whose config does not say {error}; only decoders of the Llama family are known."
            " To simulate it, give one of about its size"
        ) from error
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return _as_made(size, model) if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else size


def _tied_by_itself(kind: str | None) -> bool:
    """The default of `tie_word_embeddings` in a type's class; older transformers left it out of config.json."""
    from transformers import CONFIG_MAPPING

    return kind is not None and kind in CONFIG_MAPPING and bool(CONFIG_MAPPING[kind]().tie_word_embeddings)


def _with_tower(model: str) -> ModelSize:
    """The size of a model that reads pictures: its decoder, with the parameters of transformers' model beyond it."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    text = config.get_text_config()
    with torch.device("meta"):
        made: Any = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    decoder = made.get_decoder()
    of_text = {*decoder.parameters(), *made.get_output_embeddings().parameters()}
    tower = sum(parameter.numel() for parameter in {*made.parameters()} - of_text)
    size = _read(model, {**text.to_dict(), "model_type": None})  # what its kind adds is among the others
    size = replace(size, **_norms(decoder, size.layers))
    others = sum(parameter.numel() for parameter in of_text) - size.parameters
    attending = [each in ("full_attention", "hybrid") for each in getattr(text, "layer_types", None) or ()]
    merged, width, kept = _of_pass(config)
    return replace(
        size,
        tower=tower,
        others=others,
        attending=sum(attending) if attending else None,
        state=state_size(made),
        patches=merged**2,
        tower_width=width,
        tower_kept=kept,
    )


def _of_pass(config: Any) -> tuple[int, int, int]:
    """Numbers of a tower's forward pass: patches on a side that become one token, `tower_width`, and `tower_kept`.

    A layer keeps the inputs of its norms and linear layers, and queries, keys and values: 9 times its width. Rotary
    embeddings keep 4 times the width more. Its feed-forward layer keeps what goes into the activation function and what
    comes out of it; a gated one also the other factor and the product.
    """
    tower = config.vision_config
    layers, gated = getattr(tower, "depth", None) or tower.num_hidden_layers, config.model_type == "qwen2_5_vl"
    merged = getattr(tower, "spatial_merge_size", None) or config.scale_factor
    kept = (13 if config.model_type in QWEN else 9) * tower.hidden_size + (4 if gated else 2) * tower.intermediate_size
    return merged, layers * tower.hidden_size, layers * kept


def _as_made(size: ModelSize, model: str) -> ModelSize:
    """The size with what transformers' model has beyond it, and without what that lacks."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    parameters, state = sum(parameter.numel() for parameter in made.parameters()), state_size(made)
    size = replace(size, **_norms(made, size.layers))
    lacking = (size.parameters - parameters) / size.layers
    size = replace(size, gated=bool(size.experts) or lacking < size.expert / 6)  # a gate is a third of the parameters
    attending = sum(kind in ("full_attention", "hybrid") for kind in config.layer_types) if state else None
    return replace(size, others=parameters - size.parameters, attending=attending, state=state)


def _norms(decoder: Any, layers: int) -> dict[str, Any]:
    """The `norms`, `rms` and `qk_norm` of a `ModelSize`, by the modules of transformers' decoder."""
    from torch import nn

    within = [(type(module).__name__, norm) for module in decoder.modules() for norm in module.children()]
    found = [(name, norm) for name, norm in within if "Norm" in type(norm).__name__]
    of_hidden = [norm for name, norm in found if "Layer" in name or "Block" in name]
    return {
        "norms": len(of_hidden) // layers,
        "rms": not any(isinstance(norm, nn.LayerNorm) for norm in of_hidden),
        "qk_norm": any("Attention" in name for name, _ in found),
    }
