"""What a run leaves behind, and what it shows meanwhile."""

from rlflow.loggers.csv import CSVLogger
from rlflow.loggers.jsonl import JSONLLogger
from rlflow.loggers.logger import Logger
from rlflow.loggers.tensorboard import TensorBoardLogger
from rlflow.loggers.wandb import WandbLogger

__all__ = ["CSVLogger", "JSONLLogger", "Logger", "TensorBoardLogger", "WandbLogger"]
