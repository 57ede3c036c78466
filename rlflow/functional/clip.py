"""How far a policy may leave the one before and still learn."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.errors import UserError


@dataclass(frozen=True)
class Bounds:
    """How far something may leave its middle, a ratio 1 or a log ratio 0, and still count.

    Attributes:
        low: How far it may fall.
        high: How far it may rise.
    """

    low: float = 0.2
    high: float = 0.2

    def __post_init__(self) -> None:
        if not (self.low >= 0 and self.high >= 0):
            raise UserError(f"`clip.low` is {self.low} and `clip.high` is {self.high}; give both 0 or more")


@dataclass(frozen=True)
class Clip(Bounds):
    """The clip of PPO, arXiv 1707.06347, of the ratio of the policy to the old one.

    Attributes:
        dual: Ratio, above 1, from which a negative advantage no longer counts (arXiv 1912.09729); None is off.
    """

    dual: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual is not None and not self.dual > 1:
            raise UserError(f"`clip.dual` is {self.dual}; a ratio above 1 (3 in the paper), or null for none")
