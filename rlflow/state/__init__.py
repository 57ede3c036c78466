"""What a module keeps from step to step, in checkpoints too."""

from rlflow.state.adaptive_coefficient import AdaptiveCoefficient
from rlflow.state.prompt_memory import PromptMemory
from rlflow.state.replay_buffer import ReplayBuffer

__all__ = ["AdaptiveCoefficient", "PromptMemory", "ReplayBuffer"]
