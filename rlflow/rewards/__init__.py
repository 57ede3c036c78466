"""Rewards: what scores responses."""

from rlflow.rewards.exact_match import ExactMatch
from rlflow.rewards.function import CallableReward
from rlflow.rewards.math_verify import MathVerify
from rlflow.rewards.reasoning_gym import ReasoningGymScore
from rlflow.rewards.reward import Reward, SampleReward, Scores
from rlflow.rewards.weighted_sum import WeightedSum

__all__ = [
    "CallableReward",
    "ExactMatch",
    "MathVerify",
    "ReasoningGymScore",
    "Reward",
    "SampleReward",
    "Scores",
    "WeightedSum",
]
