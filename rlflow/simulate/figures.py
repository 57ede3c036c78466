"""Figures of the DistFlow paper, arXiv 2507.13833: throughput of verl v0.4.0 and of DistFlow on Qwen2.5.

Thousand tokens a second, read off the bars, so about 2 % uncertain. Weak scaling: the global batch grows with the nodes
of 8 GPUs. Prompts of 2,048 tokens, responses of 4,096. What ran out of memory or was not run is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["GRPO", "PPO"]
Model = Literal["7B", "32B", "72B"]
System = Literal["verl", "distflow"]


@dataclass(frozen=True)
class Curve:
    """What is measured at different sizes of cluster and else alike."""

    algorithm: Algorithm
    model: Model
    system: System

    def __str__(self) -> str:
        return f"{self.algorithm:<4} {self.model:>3} {self.system}"


@dataclass(frozen=True)
class Figure:
    """One bar.

    Attributes:
        curve: Whose.
        gpus: How many.
        rate: Thousand tokens a second, all GPUs together.
    """

    curve: Curve
    gpus: int
    rate: float


BATCH_PER_NODE: dict[tuple[Algorithm, Model], int] = {
    ("GRPO", "7B"): 1024,
    ("GRPO", "32B"): 512,
    ("GRPO", "72B"): 256,
    ("PPO", "7B"): 1024,
    ("PPO", "32B"): 1024,
    ("PPO", "72B"): 512,
}

_RATES: dict[tuple[Algorithm, Model, System], dict[int, float]] = {
    ("GRPO", "7B", "verl"): {8: 19.3, 16: 35.3, 32: 59.3, 64: 91.3},
    ("GRPO", "7B", "distflow"): {8: 22.0, 16: 44.7, 32: 86.0, 64: 170.0},
    ("GRPO", "32B", "verl"): {16: 10.2, 32: 18.8, 64: 34.5},
    ("GRPO", "32B", "distflow"): {16: 11.8, 32: 22.8, 64: 44.2},
    ("GRPO", "72B", "verl"): {32: 6.1, 64: 11.5},
    ("GRPO", "72B", "distflow"): {32: 7.6, 64: 14.9},
    ("PPO", "7B", "verl"): {8: 12.1, 16: 21.4, 32: 37.7, 64: 68.1},
    ("PPO", "7B", "distflow"): {8: 12.8, 16: 25.3, 32: 47.1, 64: 90.6},
    ("PPO", "32B", "verl"): {16: 6.6, 32: 12.1, 64: 22.9},
    ("PPO", "32B", "distflow"): {16: 7.1, 32: 14.1, 64: 27.6},
    ("PPO", "72B", "verl"): {64: 9.3},
    ("PPO", "72B", "distflow"): {32: 6.0, 64: 11.9},
}

FIGURES: tuple[Figure, ...] = tuple(
    Figure(Curve(*names), gpus, rate) for names, rates in _RATES.items() for gpus, rate in rates.items()
)
CURVES: tuple[Curve, ...] = tuple(dict.fromkeys(figure.curve for figure in FIGURES))

# How many times as fast as verl DistFlow is at context lengths in tokens; verl's 32B has no figure at 65,536.
CONTEXT_SPEEDUPS: dict[Model, dict[int, float]] = {
    "7B": {8192: 1.47, 16384: 1.62, 32768: 1.85, 65536: 1.98},
    "32B": {8192: 1.35, 16384: 1.32, 32768: 1.27},
}
