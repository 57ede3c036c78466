"""What one rank holds of one step. Where steps overlap, there are several."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.rows import RowSpace
from rlflow.metrics import StepMetrics


@dataclass
class InStep:
    """The rows and values of a step in progress.

    Attributes:
        step: From 0.
        buffer: Its values.
        metrics: What this rank logs of it.
        spaces: Its rows by name, those that this rank has to do with.
        draw: The last of the draws of prompts that it was made of, from 0.
    """

    step: int
    buffer: DataBuffer
    metrics: StepMetrics
    spaces: dict[str, RowSpace] = field(default_factory=dict)
    draw: int = 0
