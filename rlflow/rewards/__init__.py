"""Rewards score responses."""

from rlflow.rewards.answers import ExactMatch as ExactMatch
from rlflow.rewards.answers import MathVerify as MathVerify
from rlflow.rewards.answers import ReasoningGymScore as ReasoningGymScore
from rlflow.rewards.answers import SumValue as SumValue
from rlflow.rewards.by_dataset import ByDataset as ByDataset
from rlflow.rewards.code import CodeTests as CodeTests
from rlflow.rewards.function import CallableReward as CallableReward
from rlflow.rewards.http import HTTPReward as HTTPReward
from rlflow.rewards.judge import Judge as Judge
from rlflow.rewards.judge import Rubric as Rubric
from rlflow.rewards.reward import Reward as Reward
from rlflow.rewards.reward import RewardInput as RewardInput
from rlflow.rewards.reward import SampleReward as SampleReward
from rlflow.rewards.reward import Scores as Scores
from rlflow.rewards.reward import TrainerState as TrainerState
from rlflow.rewards.weighted_sum import RewardLike as RewardLike
from rlflow.rewards.weighted_sum import WeightedSum as WeightedSum
from rlflow.rewards.weighted_sum import as_reward as as_reward
