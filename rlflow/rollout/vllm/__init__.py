"""The one package that knows vLLM."""

from rlflow.rollout.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
