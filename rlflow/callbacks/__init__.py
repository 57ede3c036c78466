"""Code of a user's own at fixed points of a run."""

from rlflow.callbacks.callback import Callback, RunningTrainer
from rlflow.callbacks.early_stopping import EarlyStopping

__all__ = ["Callback", "EarlyStopping", "RunningTrainer"]
