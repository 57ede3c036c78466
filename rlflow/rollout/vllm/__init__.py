"""`VLLMEngine`, and all code that depends on vLLM: nothing outside this package imports vLLM or relies on its parts."""

from rlflow.rollout.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
