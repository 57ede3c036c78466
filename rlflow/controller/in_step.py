"""What one rank holds of one step. Where steps overlap, there are several."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.rows import RowSpace


@dataclass
class InStep:
    """The rows and values of a step that is under way.

    Attributes:
        step: From 0.
        buffer: Its values.
        spaces: Its rows by name, those that this rank has to do with.
        lengths: Of values with lengths of their own, such as a rollout node's that keeps the prompts' rows: `[N]`
            response tokens, by value.
        draw: The last of the draws of prompts that it was made of, from 0.
    """

    step: int
    buffer: DataBuffer
    spaces: dict[str, RowSpace] = field(default_factory=dict)
    lengths: dict[str, Tensor] = field(default_factory=dict)
    draw: int = 0

    def lengths_of(self, value: str, space: str) -> Tensor:
        """Where `PerToken` columns of a value are cut: its own lengths, or those of its rows."""
        return self.lengths[value] if value in self.lengths else self.spaces[space].lengths
