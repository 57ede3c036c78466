"""Loggers of a run, and its output on the terminal while it runs."""

from rlflow.loggers.csv import CSVLogger
from rlflow.loggers.jsonl import JSONLLogger
from rlflow.loggers.lightning import TensorBoardLogger, WandbLogger
from rlflow.loggers.logger import Logger

__all__ = ["CSVLogger", "JSONLLogger", "Logger", "TensorBoardLogger", "WandbLogger"]
