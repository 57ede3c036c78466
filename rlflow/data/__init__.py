"""Datasets: their rows, how they are loaded, and in which order."""

from rlflow.data.generated import RandomRows as RandomRows
from rlflow.data.generated import ReasoningGym as ReasoningGym
from rlflow.data.generated import ReasoningGymHints as ReasoningGymHints
from rlflow.data.generated import ReasoningGymPairs as ReasoningGymPairs
from rlflow.data.mixture import MixedDataset as MixedDataset
from rlflow.data.mixture import Mixture as Mixture
from rlflow.data.prompts import PromptData as PromptData
from rlflow.data.scripted_conversations import ScriptedConversations as ScriptedConversations
from rlflow.data.sources import JSONL as JSONL
from rlflow.data.sources import DataLike as DataLike
from rlflow.data.sources import HuggingFace as HuggingFace
from rlflow.data.sources import Parquet as Parquet
from rlflow.data.sources import Source as Source
from rlflow.data.sources import as_source as as_source
from rlflow.values.response_settings import SamplingSettings as SamplingSettings
