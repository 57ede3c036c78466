"""State of a module that lasts from step to step and is saved in checkpoints."""

from rlflow.state.adaptive_coefficient import AdaptiveCoefficient as AdaptiveCoefficient
from rlflow.state.curriculum import Curriculum as Curriculum
from rlflow.state.prompt_memory import PromptMemory as PromptMemory
from rlflow.state.replay_buffer import ReplayBuffer as ReplayBuffer
