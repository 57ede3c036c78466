"""What a run leaves behind, and what it shows meanwhile."""

from rlflow.loggers.csv import CSVLogger
from rlflow.loggers.jsonl import JSONLLogger
from rlflow.loggers.lightning import TensorBoardLogger, WandbLogger
from rlflow.loggers.logger import Logger

__all__ = ["CSVLogger", "JSONLLogger", "Logger", "TensorBoardLogger", "WandbLogger"]
