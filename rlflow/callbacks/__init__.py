"""Code of a user's own at fixed points of a run, and callbacks under the names of Lightning's."""

from rlflow.callbacks.callback import Callback, RunningTrainer
from rlflow.callbacks.early_stopping import EarlyStopping
from rlflow.callbacks.monitors import LearningRateMonitor, ThroughputMonitor
from rlflow.callbacks.presets import ModelCheckpoint, SampleTable
from rlflow.callbacks.timer import Timer

__all__ = [
    "Callback",
    "EarlyStopping",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "RunningTrainer",
    "SampleTable",
    "ThroughputMonitor",
    "Timer",
]
