"""Training with DeepSpeed. The one package that imports it."""

from rlflow.strategies.deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]
