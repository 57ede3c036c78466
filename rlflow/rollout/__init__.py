"""Engines that generate responses, and the sync that gives them the trained weights."""

from rlflow.rollout.assignment import Share
from rlflow.rollout.beside import EngineBeside
from rlflow.rollout.beside_process import EngineProcessError
from rlflow.rollout.children import sampling_seed
from rlflow.rollout.engine import Completion, EnginePlace, RolloutEngine, Sampling, SyncReport
from rlflow.rollout.manifest import WeightSyncError
from rlflow.rollout.transformers import TransformersEngine
from rlflow.rollout.vllm import VLLMEngine

__all__ = [
    "Completion",
    "EngineBeside",
    "EnginePlace",
    "EngineProcessError",
    "RolloutEngine",
    "Sampling",
    "Share",
    "SyncReport",
    "TransformersEngine",
    "VLLMEngine",
    "WeightSyncError",
    "sampling_seed",
]
