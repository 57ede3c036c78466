"""Engines that generate responses, and the sync of trained weights to them."""

from rlflow.rollout.assignment import Share
from rlflow.rollout.engine import Completion, RankInfo, RolloutEngine, Sampling, SyncReport, WeightSyncError
from rlflow.rollout.engine_subprocess import EngineProcessError, EngineSubprocess
from rlflow.rollout.sampling import sampling_seed
from rlflow.rollout.transformers import TransformersEngine
from rlflow.rollout.vllm import VLLMEngine

__all__ = [
    "Completion",
    "EngineProcessError",
    "EngineSubprocess",
    "RankInfo",
    "RolloutEngine",
    "Sampling",
    "Share",
    "SyncReport",
    "TransformersEngine",
    "VLLMEngine",
    "WeightSyncError",
    "sampling_seed",
]
