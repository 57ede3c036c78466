"""What scores responses: the interface, and the policy for scorers that fail."""

from __future__ import annotations

import logging
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlflow.errors import UserError, did_you_mean, one_line

OnError = Literal["raise", "zero"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """The scores of `B` samples.

    Attributes:
        total: The reward of each sample.
        parts: Scores that went into the total, by name, each as long as `total`.
        errors: How many samples the scorer failed on and were scored 0.
    """

    total: list[float]
    parts: dict[str, list[float]] = field(default_factory=dict)
    errors: int = 0


class Reward(ABC):
    """Scores responses. A response is the decoded text, special tokens left out; a row is the dataset's."""

    @abstractmethod
    def score(self, texts: Sequence[str], rows: Sequence[dict[str, Any]]) -> Scores:
        """The scores of `texts`, each an answer to the row at its place.

        Raises:
            UserError: The scorer failed on a sample, or a row lacks what it needs.
        """


class SampleReward(Reward):
    """A reward that looks at one sample at a time; there is no time limit on a sample.

    Args:
        on_error: What a sample gets whose scorer raises or returns no finite number: `raise` stops the run and names
            the sample, `zero` scores it 0 and counts it.
    """

    def __init__(self, on_error: OnError = "raise") -> None:
        self.on_error = on_error

    @abstractmethod
    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        """The score of one response."""

    def score(self, texts: Sequence[str], rows: Sequence[dict[str, Any]]) -> Scores:
        total, failures = [], []
        for i, (text, row) in enumerate(zip(texts, rows, strict=True)):
            try:
                total.append(_number(self.score_sample(text, row)))
            except UserError:
                raise  # the row or the configuration is at fault, not the response
            except Exception as error:
                reason = f"{type(error).__name__}: {one_line(error)}"
                failure = f"{self} failed on sample {i} with {reason} (response {text[:60]!r}, row {row!r:.120})"
                if self.on_error == "raise":
                    raise UserError(f"{failure}; mend it, or set `on_error: zero`") from error
                total.append(0.0)
                failures.append(failure)
        if failures:
            log.warning("%d of %d samples were scored 0; %s", len(failures), len(texts), failures[0])
        return Scores(total, errors=len(failures))

    def __str__(self) -> str:
        return type(self).__name__


def column(row: dict[str, Any], name: str) -> Any:
    """The row's column.

    Raises:
        UserError: The row has no such column.
    """
    if name not in row:
        found = ", ".join(row)
        raise UserError(
            f"the reward reads column `{name}`, which the dataset's row lacks; columns found: {found}."
            f"{did_you_mean(name, row)}"
        )
    return row[name]


def _number(score: Any) -> float:
    if not isinstance(score, numbers.Real):
        raise TypeError(f"it returned {score!r:.60}, not a number")
    if not math.isfinite(score):
        raise ValueError(f"it returned {score}")
    return float(score)
