"""Checks of architectures and sequence lengths by a model's configuration, before a weight is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rlflow.errors import UserError
from rlflow.models.attention import heads_of
from rlflow.models.logprobs import unknown_logit_settings
from rlflow.models.mixers import MIXERS, STATE_LAYERS, mixers_of
from rlflow.models.picture_processor import FAMILIES, reads_pictures
from rlflow.models.remote_code import stored_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig


ATTENTION = {"full_attention", "sliding_attention"}
FEED_FORWARD = {"mlp", "moe"}  # layers of one token each
NEEDED = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")  # also for a model's own code
# Keys of a configuration that say who wrote it and how, what is fed to the model, and what is stored between tokens
NOT_ARCHITECTURE = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def check_architecture(
    config: PretrainedConfig, setting: str, scores_tokens: bool, trust_remote_code: bool = False
) -> None:
    """Refuse a model that would score packed sequences wrongly.

    Args:
        config: The model's transformers configuration.
        setting: Setting that named the model, as the error calls it.
        scores_tokens: Whether it is read as a causal language model, with an output layer that scores tokens.
        trust_remote_code: Whether code in the model's folder may run and define how the model computes.

    Raises:
        UserError: It cannot be trained or scored here.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    )

    auto = "AutoModelForCausalLM" if scores_tokens else "AutoModelForSequenceClassification"
    stored = stored_class(config, auto) if trust_remote_code else None
    kind: Any = stored or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)  # its language model
    reason: str | None
    if reads_pictures(config):
        of_pictures = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        reason = _refusal(config, of_pictures, scores_tokens, trust_remote_code=False)
    elif config.get_text_config() is not config:
        reason = (
            "reads more than text, and of such models only those of the types"
            f" {', '.join(sorted(FAMILIES))} are run here; give one of them, or a model of text alone"
        )
        if kind is not None and kind.config_class is type(config.get_text_config()):
            reason += ": its own part, `AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(FOLDER)`"
    elif kind is None:
        named = f", and `auto_map` of its config.json names no {auto}" if trust_remote_code else ""
        reason = f"is not a causal language model of transformers'{named}; give one"
    elif not scores_tokens and stored is None and type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        reason = "is not a model for sequence classification of transformers', as one of values or rewards is; give one"
    else:
        reason = _refusal(config, kind, scores_tokens, trust_remote_code)
    if reason is not None:
        raise UserError(f"{setting} is of the type {config.model_type!r}: it {reason}")


def _refusal(config: Any, kind: Any, scores_tokens: bool, trust_remote_code: bool) -> str | None:
    if getattr(config, "quantization_config", None) is not None:
        return "has quantised weights, which cannot be trained; give the model without quantisation"
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - ATTENTION - FEED_FORWARD
    if kind._is_stateful or kinds & STATE_LAYERS:
        mixers = mixers_of(_on_meta(config, trust_remote_code))
        if not mixers or mixers - MIXERS.keys():
            by = f" by {', '.join(sorted(mixers - MIXERS.keys()))}" if mixers else _layers(sorted(kinds))
            return (
                f"carries a state from token to token{by}, which would pass from row to row of a packed line; use a"
                f" model whose layers are attention, or mixers that are known here: {', '.join(MIXERS)}"
            )
    elif not kind._supports_attention_backend:
        return (
            "has attention of its own, which cannot be kept within packed sequences; use a model for which transformers"
            " supports attention functions"
        )
    lacking = [name for name in NEEDED if getattr(text, name, None) is None]
    if lacking:
        return f"has a configuration that does not say `{lacking[0]}`; give a decoder whose configuration does"
    if others := sorted(kinds - STATE_LAYERS):
        return f"has layers{_layers(others)}, which are not computed here; use a model of full or sliding attention"
    if any("dynamic" in rope.get("rope_type", "") for rope in rotary_embeddings(config)):
        return (
            "has a rotary embedding that changes with the longest sequence (`rope_type`: dynamic), and packed sequences"
            " would change it for each other; use a model with another one"
        )
    if scores_tokens:
        if unknown := unknown_logit_settings(config):
            return f"shapes its logits ({', '.join(unknown)}) in a way that is not known here; use a model without it"
        head = _on_meta(config, trust_remote_code).get_output_embeddings()
        if head.bias is not None:
            return "has a bias in its output layer, which tokens are scored without here; use a model without one"
    return None


def _on_meta(config: Any, trust_remote_code: bool) -> Any:
    """The model's layers, without weights."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind: Any = AutoModelForImageTextToText if reads_pictures(config) else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config, trust_remote_code=trust_remote_code)


def _layers(kinds: list[str]) -> str:
    return f" (`layer_types`: {', '.join(kinds)})" if kinds else ""


def architecture_difference(left: PretrainedConfig, right: PretrainedConfig) -> str | None:
    """The first setting that differs between two models and that changes their tensors or their results.

    Args:
        left: A transformers configuration.
        right: Another.

    Returns:
        Such as "`hidden_size` is 64 there and 128 here"; None where the one's weights can replace the other's.
    """
    there, here = left.to_dict(), right.to_dict()
    for name in there | here:
        if name not in NOT_ARCHITECTURE and there.get(name) != here.get(name):
            return f"`{name}` is {there.get(name)!r} there and {here.get(name)!r} here"
    return None


ORIGINAL = "original_max_position_embeddings"


def positions(config: Any) -> int | None:
    """Tokens of the longest sequence that a model takes, by its transformers configuration; None without a limit.

    Where the rotary embedding is `longrope`, that is the length before it was extended. One sequence beyond it would
    change the frequencies of all that are packed with it.
    """
    limit = _limit(config)
    return None if limit is None else limit[1]


def rotary_embeddings(config: Any) -> list[dict[str, Any]]:
    """The `rope_parameters` of a transformers configuration: of all layers, or of each kind of layers."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [of_kind for of_kind in rope.values() if isinstance(of_kind, dict)]
    return kinds or [rope]


def _limit(config: Any) -> tuple[str, int] | None:
    """The setting that limits the length of sequences, and the limit."""
    for rope in rotary_embeddings(config):
        if rope.get("rope_type") == "longrope":
            return ORIGINAL, rope[ORIGINAL]
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    if limit is None:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "linear":  # its factor is not yet in the limit
        limit = int(limit * rope["factor"])
    return "max_position_embeddings", limit


def check_positions(config: Any, tokens: int, role: str, of: str, prompt: int | None = None) -> None:
    """Refuse sequences that are longer than a model takes.

    Args:
        config: The model's transformers configuration.
        tokens: Length of the longest sequence.
        role: Role of the model, for the message.
        of: Description of the sequence, for the message.
        prompt: Tokens of it that are the prompt's, where the rest is a response that is generated.

    Raises:
        UserError: They are longer.
    """
    limit = _limit(config)
    if limit is None or tokens <= limit[1]:
        return
    lower = "`data.max_prompt_length` or `module.max_response_length`"
    if prompt is not None and prompt < limit[1]:
        lower = f"`module.max_response_length` to at most {limit[1] - prompt}, or `data.max_prompt_length`"
    elif prompt is not None:
        lower = f"`data.max_prompt_length` to less than {limit[1]}"
    raise UserError(
        f"`{role}` reads {of}, {tokens} tokens, and its model takes {limit[1]} (`{limit[0]}` of its config.json);"
        f" lower {lower}, or take a model of longer context"
    )


def cached_bytes(config: Any, dtype: torch.dtype, ranks: int) -> int:
    """Bytes of the keys and values of a token on each of the ranks that share a model.

    Layers with a sliding window are left out, for they forget: the least that a long sequence takes. Layers that carry
    a state take as much for a row of any length.
    """
    count, shared = heads_of(config)
    text = config.get_text_config()
    width: int = getattr(text, "head_dim", None) or text.hidden_size // count
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        layers = 0 if getattr(text, "sliding_window", None) else text.num_hidden_layers
    else:
        layers = sum(kind in ("full_attention", "hybrid") for kind in kinds)
    if (latent := getattr(text, "kv_lora_rank", None)) is not None:  # keys and values are made of one vector of a token
        return int(layers * (latent + text.qk_rope_head_dim) * dtype.itemsize)
    return 2 * layers * max(1, shared // ranks) * width * dtype.itemsize
