"""Where a run stands, as its callbacks see it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RunState:
    """Of one rank; all but `rank` is the same on every rank.

    Attributes:
        should_stop: Whether the run ends after this step.
        step: Steps done, those before a resume included.
        epoch: The pass over the training rows, from 0.
        metrics: Of the last step and the last validation.
        rank: This one, over all machines.
        world_size: Ranks of the run.
    """

    should_stop: bool = False
    step: int = 0
    epoch: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1
