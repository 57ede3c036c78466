"""Reinforcement-learning post-training of language models, without a central node.

What an algorithm is written with is here; `rlflow.functional` has the maths, `rlflow.algorithms` the algorithms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import rlflow.process.minimum_python  # noqa: F401
from rlflow.callbacks.callback import Callback
from rlflow.dag.node import node
from rlflow.data.prompts import PromptData
from rlflow.errors import UserError
from rlflow.models.causal_lm import CausalLM
from rlflow.models.lora import LoRA
from rlflow.models.moe import MoE
from rlflow.models.optimizer import Optimizer
from rlflow.models.reward_model import RewardModel
from rlflow.models.value_model import ValueModel
from rlflow.module import RLModule
from rlflow.rewards.reward import Reward, Scores
from rlflow.state.adaptive_coefficient import AdaptiveCoefficient
from rlflow.state.prompt_memory import PromptMemory
from rlflow.state.replay_buffer import ReplayBuffer
from rlflow.values.batch import Batch, Pairs
from rlflow.values.cuts import PerSample, PerToken, Scalar
from rlflow.values.protocols import Grouped, Masked, MaskedTokens, Sampled, Sourced, Tokens, Written
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout
from rlflow.workflow.module import Workflow

if TYPE_CHECKING:
    from rlflow.trainer import Trainer

__all__ = [
    "AdaptiveCoefficient",
    "Batch",
    "Callback",
    "CausalLM",
    "Grouped",
    "LoRA",
    "Masked",
    "MaskedTokens",
    "MoE",
    "Optimizer",
    "Pairs",
    "PerSample",
    "PerToken",
    "PromptData",
    "PromptMemory",
    "RLModule",
    "Ragged",
    "ReplayBuffer",
    "Reward",
    "RewardModel",
    "Rollout",
    "Sampled",
    "Scalar",
    "Scores",
    "Sourced",
    "Tokens",
    "Trainer",
    "UserError",
    "ValueModel",
    "Workflow",
    "Written",
    "node",
]


def __getattr__(name: str) -> Any:
    if name == "Trainer":  # brings Lightning, which writing an algorithm does not need
        from rlflow.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'rlflow' has no attribute {name!r}")
