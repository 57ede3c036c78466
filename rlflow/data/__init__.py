"""Datasets: their rows, how they are loaded, and in which order."""

from rlflow.data.played import Played
from rlflow.data.prompts import PromptData
from rlflow.data.sources import JSONL, DataLike, HuggingFace, Parquet, Source, as_source
from rlflow.data.tasks import RandomRows, ReasoningGym, ReasoningGymHints, ReasoningGymPairs

__all__ = [
    "JSONL",
    "DataLike",
    "HuggingFace",
    "Parquet",
    "Played",
    "PromptData",
    "RandomRows",
    "ReasoningGym",
    "ReasoningGymHints",
    "ReasoningGymPairs",
    "Source",
    "as_source",
]
