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

DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SCAN = {  # chunks are shorter than the longest sequences of the tests
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
SHARED_EXPERT = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
SIGMOID_EXPERTS = {  # whose choice of experts a bias corrects that is not a parameter
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}

# The prefix of transformers' class names, and what the family's configuration says in addition to COMMON.
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
    "glm4_moe": ("Glm4Moe", {**SIGMOID_EXPERTS, "first_k_dense_replace": 1}),
    "deepseek_v3": ("DeepseekV3", {**SIGMOID_EXPERTS, **LATENT, "q_lora_rank": 64, "first_k_dense_replace": 1}),
    "qwen3_5": ("Qwen3_5", DELTA_RULE),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA_RULE, **SHARED_EXPERT}),
    "qwen3_next": ("Qwen3Next", {**DELTA_RULE, **SHARED_EXPERT}),
    "kimi_linear": (
        "KimiLinear",
        {
            **LATENT,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_head_dim": 32,
            "linear_num_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **SIGMOID_EXPERTS,
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 64,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            **SCAN,
            "mamba_d_ssm": 256,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5,
            "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9],
            "attention_out_multiplier": 0.8,
            "ssm_out_multiplier": 1.3,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **SCAN,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "tie_word_embeddings": True,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.7,
            "logits_scaling": 4.0,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention"],
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
}

# Each has a layer that carries a state: by a delta rule, by Kimi's, by Mamba's scan, by a convolution alone.
STATEFUL = (
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "kimi_linear",
    "nemotron_h",
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
)
NOT_IN_VLLM = ("deepseek_v3", "kimi_linear", "lfm2", "nemotron_h")
SHORT = ("gemma2", "smollm3")  # capped, windowed, tied and scaled; served by vLLM's Transformers backend
ALL = slow_but(SHORT, FAMILIES)
SERVED = [name for name in FAMILIES if name not in NOT_IN_VLLM]


def configuration(name: str) -> Any:
    """The family's transformers configuration."""
    prefix, settings = FAMILIES[name]
    text = "Text" if prefix in ("Gemma3", "Qwen3_5", "Qwen3_5Moe") else ""
    common = {key: value for key, value in COMMON.items() if prefix != "NemotronH" or key != "num_hidden_layers"}
    config_class = getattr(transformers, f"{prefix}{text}Config")
    return config_class(**common | settings, dtype=torch.float32, architectures=[f"{prefix}ForCausalLM"])


def write_family(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the family's model with random weights, and a tokenizer, in Hugging Face form; return the folder.

    Weights are large enough for tokens to differ by whole nats, and for scores and logits to come near their caps.
    """
    prefix, config = FAMILIES[name][0], configuration(name)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in parameter_name:
            parameter.data += 0.1 * noise
        else:
            scale = 1.0 if parameter_name.endswith("sinks") else 0.4 if "conv" in parameter_name else 0.1
            parameter.data = scale * noise
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    tiny_tokenizer(CONTEXT).save_pretrained(folder)
    return folder
