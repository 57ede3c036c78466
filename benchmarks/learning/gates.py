"""The gates that a run must pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.learning.runs import Record, curve, tenths

ACCURACY = "val/accuracy"
Run = list[Record]


@dataclass(frozen=True)
class Gate:
    """A number of a run, and the ends between which it must lie; a number that is not finite fails.

    Attributes:
        name: Name in tables.
        measure: Function of a run's records.
        above: The number must be more.
        below: The number must be less.
    """

    name: str
    measure: Callable[[Run], float]
    above: float = -math.inf
    below: float = math.inf

    def passes(self, run: Run) -> bool:
        """Whether a run passes."""
        return self.above < self.measure(run) < self.below


def gain(least: float) -> Gate:
    """Accuracy of the last validation less that of the first."""
    return Gate("gain", _gain, above=least)


def explained_variance(least: float) -> Gate:
    """Share of the outcome that the critic foresees, late in training; of returns with lambda 1."""
    return Gate("explained variance", lambda run: tenths(run, "critic/explained_variance")[1], above=least)


def clip_fraction() -> Gate:
    """The clip binds somewhere: several updates a step move the policy that far."""
    return Gate("clip fraction", lambda run: _mean(run, "actor/clip_fraction"), above=0.0, below=0.2)


def divergence(above: float, below: float) -> Gate:
    """KL per token from the start, late in training: 0 where nothing is trained, or where the reference is."""
    return Gate("KL", lambda run: tenths(run, "actor/kl")[1], above=above, below=below)


def _gain(run: Run) -> float:
    validated = curve(run, ACCURACY)
    return validated[-1][1] - validated[0][1]


def _mean(run: Run, metric: str) -> float:
    values = [value for _, value in curve(run, metric)]
    return sum(values) / len(values)
