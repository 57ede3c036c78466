"""Datasets: their rows, how they are loaded, and in which order."""

from rlflow.data.played import Played
from rlflow.data.prompts import PromptData
from rlflow.data.random_rows import RandomRows
from rlflow.data.sources import JSONL, HuggingFace, Parquet, Source
from rlflow.data.tasks import ReasoningGym, ReasoningGymHints, ReasoningGymPairs

__all__ = [
    "JSONL",
    "HuggingFace",
    "Parquet",
    "Played",
    "PromptData",
    "RandomRows",
    "ReasoningGym",
    "ReasoningGymHints",
    "ReasoningGymPairs",
    "Source",
]
