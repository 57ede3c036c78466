"""Small models of families whose layers carry a state from token to token, and of two whose experts have a bias.

They are made from transformers' configuration classes and a seed. Weights are large enough for a state to reach far,
and for tokens to differ by a nat. The reference is transformers' own forward of one row at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlflow.models.tiny import tiny_tokenizer
from rlflow.rollout import Completion

CONTEXT = 512

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
DELTA_RULE: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
GROUPED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# The configuration class of each, and what it says beside COMMON; None leaves a setting of COMMON out.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", DELTA_RULE),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", DELTA_RULE | QWEN_EXPERTS),
    "qwen3_next": ("Qwen3NextConfig", DELTA_RULE | QWEN_EXPERTS),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "num_hidden_layers": None,
            "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "conv_kernel": 4,
            "expand": 2,
            "chunk_size": 32,
            "use_mamba_kernels": False,
        },
    ),
    "falcon_h1": ("FalconH1Config", MAMBA | {"mamba_d_ssm": 128}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        MAMBA
        | {
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "shared_intermediate_size": 64,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "tie_word_embeddings": True,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        GROUPED_EXPERTS
        | {
            "head_dim": None,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "linear_head_dim": 32,
            "linear_num_heads": 2,
            "layer_types": DELTA_RULE["layer_types"],
        },
    ),
    "glm4_moe": ("Glm4MoeConfig", GROUPED_EXPERTS),
    "deepseek_v3": (
        "DeepseekV3Config",
        GROUPED_EXPERTS
        | {
            "head_dim": None,
            "num_key_value_heads": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
}


def write_model(name: str, folder: Path, seed: int = 0, **settings: Any) -> Path:
    """Write the family's model with random weights, and a tokenizer, in Hugging Face form; return the folder."""
    kind, given = CONFIGS[name]
    said = {key: value for key, value in (COMMON | given | settings).items() if value is not None}
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**said, dtype="float32"))
    draw(model, seed)
    model.save_pretrained(folder)
    tiny_tokenizer(CONTEXT).save_pretrained(folder)
    return folder


@torch.no_grad()
def draw(model: nn.Module, seed: int) -> None:
    """Draw every weight of a model, and the bias of routers, which is a buffer."""
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    for name, weight in weights(model):
        noise = torch.randn(weight.shape, generator=generator)
        if "conv" in name and weight.dim() == 3:
            weight.copy_(0.4 * noise)
        elif "embed" in name and weight.dim() > 1:
            weight.copy_((0.3 if tied else 0.5) * noise)
        elif name == "lm_head.weight":
            weight.copy_(0.15 * noise)
        elif weight.dim() > 1:
            weight.copy_(0.6 * noise / weight.shape[-1] ** 0.5)
        elif name.endswith("A_log"):
            weight.copy_(1.5 * torch.rand(weight.shape, generator=generator) - 0.5)
        elif name.endswith("dt_bias"):
            weight.copy_(0.5 * noise - 1)
        else:  # norms, whose weight is 1 or added to 1, and biases
            weight.copy_(weight + 0.1 * noise)


def reference(folder: Path) -> Any:
    """Transformers' model in `folder`, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def weights(model: Any) -> list[tuple[str, Tensor]]:
    """What a sync sends: parameters, and the bias of routers."""
    return [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n.endswith("correction_bias"))]


@torch.no_grad()
def change(model: Any, seed: int, scale: float = 0.02) -> None:
    """Change every tensor that a sync sends."""
    generator = torch.Generator().manual_seed(seed)
    for _, weight in weights(model):
        weight += scale * torch.randn(weight.shape, generator=generator)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 128, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def gaps(model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> list[float]:
    """For each row, the largest difference between the engine's logprobs and those of `model` reading it alone."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]  # at t they score token t + 1
        scored = torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        found.append(float((scored - torch.tensor(completion.logprobs)).abs().max()))
    return found
