"""Reinforcement-learning post-training of language models, without a central node.

What an algorithm is written with is here; `rlflow.functional` has the maths, `rlflow.algorithms` the algorithms.
"""

from __future__ import annotations

import rlflow.process.minimum_python

# isort: split
import rlflow.process.early_interrupt  # noqa: F401

# isort: split
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflow.callbacks.callback import Callback
    from rlflow.dag.node import node
    from rlflow.data.prompts import PromptData
    from rlflow.environments.environment import Environment
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
    from rlflow.trainer import Trainer
    from rlflow.values.batch import Batch, Pairs
    from rlflow.values.cuts import PerSample, PerToken, Scalar
    from rlflow.values.each import Each, Grown, Trained
    from rlflow.values.path import RowPath
    from rlflow.values.protocols import (
        Continued,
        Grouped,
        Masked,
        MaskedTokens,
        Sampled,
        Sourced,
        Tokens,
        Turns,
        Written,
    )
    from rlflow.values.ragged import Ragged
    from rlflow.values.rollout import Rollout
    from rlflow.workflow import Workflow

__all__ = [
    "AdaptiveCoefficient",
    "Batch",
    "Callback",
    "CausalLM",
    "Continued",
    "Each",
    "Environment",
    "Grouped",
    "Grown",
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
    "RowPath",
    "Sampled",
    "Scalar",
    "Scores",
    "Sourced",
    "Tokens",
    "Trained",
    "Trainer",
    "Turns",
    "UserError",
    "ValueModel",
    "Workflow",
    "Written",
    "node",
]


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for: a command that trains nothing waits for none of them."""
    if name not in _MODULES:
        raise AttributeError(f"module 'rlflow' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


_MODULES = {
    "Callback": "rlflow.callbacks.callback",
    "node": "rlflow.dag.node",
    "PromptData": "rlflow.data.prompts",
    "Environment": "rlflow.environments.environment",
    "UserError": "rlflow.errors",
    "CausalLM": "rlflow.models.causal_lm",
    "LoRA": "rlflow.models.lora",
    "MoE": "rlflow.models.moe",
    "Optimizer": "rlflow.models.optimizer",
    "RewardModel": "rlflow.models.reward_model",
    "ValueModel": "rlflow.models.value_model",
    "RLModule": "rlflow.module",
    "Reward": "rlflow.rewards.reward",
    "Scores": "rlflow.rewards.reward",
    "AdaptiveCoefficient": "rlflow.state.adaptive_coefficient",
    "PromptMemory": "rlflow.state.prompt_memory",
    "ReplayBuffer": "rlflow.state.replay_buffer",
    "Batch": "rlflow.values.batch",
    "Pairs": "rlflow.values.batch",
    "PerSample": "rlflow.values.cuts",
    "PerToken": "rlflow.values.cuts",
    "Scalar": "rlflow.values.cuts",
    "Each": "rlflow.values.each",
    "Grown": "rlflow.values.each",
    "Trained": "rlflow.values.each",
    "RowPath": "rlflow.values.path",
    "Continued": "rlflow.values.protocols",
    "Grouped": "rlflow.values.protocols",
    "Masked": "rlflow.values.protocols",
    "MaskedTokens": "rlflow.values.protocols",
    "Sampled": "rlflow.values.protocols",
    "Sourced": "rlflow.values.protocols",
    "Tokens": "rlflow.values.protocols",
    "Turns": "rlflow.values.protocols",
    "Written": "rlflow.values.protocols",
    "Ragged": "rlflow.values.ragged",
    "Rollout": "rlflow.values.rollout",
    "Workflow": "rlflow.workflow",
    "Trainer": "rlflow.trainer",
}
