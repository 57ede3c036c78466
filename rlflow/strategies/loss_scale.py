"""The factor on a loss whose gradients are in float16: without it small ones are 0, with too large a one they overflow.

Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 2.0**14
LEAST = 1.0
LONG = 500  # updates without an overflow after which a larger factor is tried


@dataclass
class LossScale:
    """A power of 2, halved by an update whose gradient overflowed and doubled after many that did not.

    It depends on the role's updates alone, whose gradient all its ranks see alike.

    Attributes:
        factor: On the loss; gradients are divided by it before they are clipped.
        clean: Updates since it last changed.
    """

    factor: float = FIRST
    clean: int = 0

    def update(self, finite: bool) -> None:
        """After an update, whose gradient was `finite` or was not, so that it was skipped."""
        if not finite:
            self.factor, self.clean = max(self.factor / 2, LEAST), 0
            return
        self.clean += 1
        if self.clean == LONG:
            self.factor, self.clean = self.factor * 2, 0

    @property
    def can_fall(self) -> bool:
        """Whether a smaller factor is left to be tried."""
        return self.factor > LEAST

    def record(self) -> tuple[float, int]:
        """For a checkpoint; `LossScale(*record)` goes on from it."""
        return self.factor, self.clean
