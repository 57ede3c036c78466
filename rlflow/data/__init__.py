"""Datasets: their rows, how they are loaded, and in which order."""

from rlflow.data.prompts import PromptData
from rlflow.data.sources import JSONL, HuggingFace, Parquet, Source
from rlflow.data.tasks import ReasoningGym, ReasoningGymPairs

__all__ = ["JSONL", "HuggingFace", "Parquet", "PromptData", "ReasoningGym", "ReasoningGymPairs", "Source"]
