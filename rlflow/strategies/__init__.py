"""Strategies: how training is divided over ranks."""

import rlflow.process.deferred  # noqa: F401  (before the modules below import parts of Lightning)
from rlflow.strategies.deepspeed import DeepSpeedStrategy
from rlflow.strategies.fsdp import FSDPStrategy
from rlflow.strategies.single import SingleProcess
from rlflow.strategies.strategy import TrainingStrategy

__all__ = ["DeepSpeedStrategy", "FSDPStrategy", "SingleProcess", "TrainingStrategy"]
