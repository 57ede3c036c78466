"""Which models vLLM serves as training needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlflow.rollout.vllm.experts import unserved_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # sizes, as vLLM's `CPUAttentionBackend` says
# Types of models that vLLM 0.32 serves otherwise than training needs.
UNSERVED = {
    "cohere2": "sees one token more through its sliding windows in vLLM than in transformers",
    "glm4": "has fused layers in vLLM, which lists them by other names than transformers'",
}


def unserved(config: PretrainedConfig, tensor_parallel_size: int, on_cpu: bool) -> str | None:
    """Why vLLM cannot generate with a model so that each sync is verified; None where it can.

    Args:
        config: The model's transformers configuration, of its text.
        tensor_parallel_size: Ranks that share one copy of the weights.
        on_cpu: Whether vLLM's build is for the CPU.
    """
    return (
        UNSERVED.get(config.model_type)
        or unserved_experts(config, tensor_parallel_size, on_cpu)
        or _without_decoder(config)
        or (_without_kernel(config) if on_cpu else None)
    )


def _without_decoder(config: PretrainedConfig) -> str | None:
    """vLLM serves code that lies beside a model by its decoder alone."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    if type(config) in MODEL_MAPPING or "AutoModel" in (getattr(config, "auto_map", None) or {}):
        return None
    return "is of code that lies beside it and names no `AutoModel` in `auto_map`, by which vLLM serves such code"


def _without_kernel(config: PretrainedConfig) -> str | None:
    """Why vLLM's attention on the CPU does not compute a model; None where it does."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size in CPU_HEADS:
        return None
    sizes = ", ".join(map(str, CPU_HEADS))
    return f"has attention heads of the size {size}, and vLLM's attention on the CPU takes {sizes}"
