"""Coefficients that a run adapts: state of the module, with one owner, saved in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.errors import UserError

MOST_ERROR = 0.2  # a single step changes the coefficient by at most this share, times rows over horizon
LEAST_FACTOR = 0.1  # of a step with more rows than 4.5 horizons, whose factor could else be below 0


@dataclass(eq=False)
class AdaptiveCoefficient:
    """A coefficient that rises while what it restrains is above its target, and falls while below.

        value <- value (1 + clip(observed / target - 1, -0.2, 0.2) rows / horizon)

    Ziegler et al., arXiv 1909.08593, section 2.2. The factor is at least 0.1. Without a target it stays as it is.

    Args:
        value: Value to begin with.
        target: Target of the number that it restrains, above 0; None for a fixed coefficient.
        horizon: Rows after which an error of 100% would double the coefficient, if it were not clipped.

    Attributes:
        value: Value now.
    """

    value: float
    target: float | None = None
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        value, target = self.value, self.target
        if not value >= 0:
            raise UserError(f"the coefficient is {value}; give 0 or more")
        if target is not None and not (target > 0 and value > 0):
            raise UserError(
                f"the coefficient {value} with target {target} cannot adapt, as it is multiplied; give both above 0"
            )
        if not self.horizon > 0:
            raise UserError(f"the horizon of the coefficient is {self.horizon}; it is a number of rows above 0")

    def update(self, observed: float, rows: int) -> None:
        """Adapt to the `observed` mean over `rows` rows of all ranks; called with the same numbers on every rank.

        Exactly 0 says that nothing has moved yet, as before a policy's first update, and adapts nothing.
        """
        if self.target is None or observed == 0:
            return
        error = min(max(observed / self.target - 1.0, -MOST_ERROR), MOST_ERROR)
        self.value *= max(1.0 + error * rows / self.horizon, LEAST_FACTOR)
