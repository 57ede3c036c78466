"""Small models of common families, made from transformers' configuration classes and a seed.

Each has what its family is known for: grouped heads, windows shorter than the sequences, its rotary embedding, norms of
queries and keys, capped scores and logits, attention sinks. Head sizes are those that vLLM takes on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from rlflow.models.tiny import tiny_tokenizer
from tests.slow import slow_but

WINDOW = 8  # tokens: shorter than the sequences of the tests
CONTEXT = 256

COMMON = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

# The prefix of transformers' class names, and what the family's configuration says beside COMMON.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "llama": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2",
        {
            **SLIDING,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": ("Gemma3", {**SLIDING, "tie_word_embeddings": True, "query_pre_attn_scalar": 24}),
    "phi3": ("Phi3", {"sliding_window": WINDOW, "partial_rotary_factor": 0.75}),
    "granite": (
        "Granite",
        {
            "tie_word_embeddings": True,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "mixtral": (
        "Mixtral",
        {"sliding_window": None, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt_oss": (
        "GptOss",
        {
            **SLIDING,
            "rope_parameters": YARN,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
        },
    ),
    "glm4": ("Glm4", {"partial_rotary_factor": 0.5, "attention_bias": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    "cohere2": ("Cohere2", {**SLIDING, "tie_word_embeddings": True, "logit_scale": 0.5}),
}

NOT_IN_VLLM = ("glm4", "cohere2")
SHORT = ("gemma2", "smollm3")  # capped, windowed, tied and scaled; served by vLLM's Transformers backend
ALL = slow_but(SHORT, FAMILIES)
SERVED = [name for name in FAMILIES if name not in NOT_IN_VLLM]


def write_family(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the family's model with random weights, and a tokenizer, in Hugging Face form; return the folder.

    Weights are large enough for tokens to differ by whole nats, and for scores and logits to come near their caps.
    """
    prefix, settings = FAMILIES[name]
    config_class = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(prefix, f"{prefix}Config"))
    config = config_class(**COMMON | settings, dtype=torch.float32, architectures=[f"{prefix}ForCausalLM"])
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in parameter_name:
            parameter.data += 0.1 * noise
        else:
            parameter.data = noise if parameter_name.endswith("sinks") else 0.1 * noise
    model.save_pretrained(folder)
    tiny_tokenizer(CONTEXT).save_pretrained(folder)
    return folder
