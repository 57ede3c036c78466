"""The data plane: datasets, rows, layouts, and the buffer that exchanges values between them."""

from rlflow.data.prompts import PromptData
from rlflow.data.sources import JSONL, HuggingFace, Parquet, Source
from rlflow.data.tasks import ReasoningGym, ReasoningGymPairs

__all__ = ["JSONL", "HuggingFace", "Parquet", "PromptData", "ReasoningGym", "ReasoningGymPairs", "Source"]
