"""Several rewards as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow.errors import UserError
from rlflow.rewards.reward import Failed, Reward, Scores, scored

_WEIGHS: dict[Failed, int] = {"zero": 0, "mask": 1, "skip": 2}  # of two policies for a sample


class WeightedSum(Reward):
    """The weighted sum of several rewards; each part is logged unweighted under its name.

    Of a reward that has parts of its own, such as a function that returns a dict, their sum is one part here. A sample
    that several parts fail on counts once, and the strictest of their policies holds: under `zero` that part alone
    counts 0, under `mask` and `skip` the whole sample.

    Args:
        parts: The rewards by name.
        weights: The weight of each, under the same names.
    """

    def __init__(self, parts: dict[str, Reward], weights: dict[str, float]) -> None:
        if not parts or parts.keys() != weights.keys():
            raise UserError(
                f"`parts` are [{', '.join(parts)}] but `weights` are for [{', '.join(weights)}];"
                " give at least one part, and each a weight"
            )
        self.parts = parts
        self.weights = weights

    @property
    def leaves_out(self) -> bool:
        return any(part.leaves_out for part in self.parts.values())

    @property
    def reads(self) -> dict[str, bool]:
        found: dict[str, bool] = {}
        for part in self.parts.values():
            found |= {name: may_be_null and found.get(name, True) for name, may_be_null in part.reads.items()}
        return found

    @property
    def checked_by(self) -> str:
        return " + ".join(part.checked_by for part in self.parts.values())

    def check(self, row: dict[str, Any]) -> None:
        for part in self.parts.values():
            part.check(row)

    def score(self, texts: Sequence[str], rows: Sequence[dict[str, Any]]) -> Scores:
        scores = {name: scored(part, texts, rows) for name, part in self.parts.items()}
        failed: dict[int, Failed] = {}
        for part in scores.values():
            failed |= {i: how for i, how in part.failed.items() if i not in failed or _WEIGHS[how] > _WEIGHS[failed[i]]}
        weighted = [[self.weights[name] * score for score in part.total] for name, part in scores.items()]
        total = [sum(sample) for sample in zip(*weighted, strict=True)]
        return Scores(total, {name: part.total for name, part in scores.items()}, failed)
