"""Rewards: what scores responses."""

from rlflow.rewards.code import CodeTests
from rlflow.rewards.exact_match import ExactMatch
from rlflow.rewards.function import CallableReward
from rlflow.rewards.http import HTTPReward
from rlflow.rewards.judge import Judge
from rlflow.rewards.math_verify import MathVerify
from rlflow.rewards.reasoning_gym import ReasoningGymScore
from rlflow.rewards.reward import Reward, RewardInput, SampleReward, Scores, TrainerState
from rlflow.rewards.rubric import Rubric
from rlflow.rewards.sums import SumValue
from rlflow.rewards.weighted_sum import RewardLike, WeightedSum, as_reward

__all__ = [
    "CallableReward",
    "CodeTests",
    "ExactMatch",
    "HTTPReward",
    "Judge",
    "MathVerify",
    "ReasoningGymScore",
    "Reward",
    "RewardInput",
    "RewardLike",
    "Rubric",
    "SampleReward",
    "Scores",
    "SumValue",
    "TrainerState",
    "WeightedSum",
    "as_reward",
]
