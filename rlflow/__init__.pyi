"""The public names, each with its module: `__init__.py` reads them here and imports one when it is first asked for."""

from rlflow.callbacks.callback import Callback as Callback
from rlflow.dag.node import node as node
from rlflow.data.prompts import PromptData as PromptData
from rlflow.environments.environment import Environment as Environment
from rlflow.errors import UserError as UserError
from rlflow.harness.harness import Harness as Harness
from rlflow.models.causal_lm import CausalLM as CausalLM
from rlflow.models.lora import LoRA as LoRA
from rlflow.models.optimizer import Optimizer as Optimizer
from rlflow.models.scalar import RewardModel as RewardModel
from rlflow.models.scalar import ValueModel as ValueModel
from rlflow.module import RLModule as RLModule
from rlflow.rewards.reward import Reward as Reward
from rlflow.trainer import Trainer as Trainer
from rlflow.values.batch import Batch as Batch
from rlflow.values.batch import Pairs as Pairs
from rlflow.values.column_kinds import PerSample as PerSample
from rlflow.values.column_kinds import PerToken as PerToken
from rlflow.values.rollout import Rollout as Rollout
from rlflow.values.rollout import RolloutWithTexts as RolloutWithTexts
