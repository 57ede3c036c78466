"""Updates that are not made: their gradient is infinite, NaN, or many times as large as those before."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.errors import UserError
from rlflow.metrics import StepMetrics
from rlflow.strategies.role import LossScale

NORMS = 32  # of the last updates that had a gradient, whose median is what a norm is compared with
FEWEST = 8  # of them; before, none is too large


@dataclass
class UpdateWatch:
    """Decides which updates are skipped, and ends the run when too many were; all ranks see the same norms.

    With `skip_spikes: 10` and norms of about 0.5 in the last updates, one with the norm 7 is skipped.

    Attributes:
        times: `trainer.skip_spikes`: a norm above so many times the median of the role's last norms is too large; None
            to skip only infinite and NaN norms.
        most: `trainer.max_skipped`: so many skipped updates of a role in a row end the run.
    """

    times: float | None = None
    most: int = 3
    _skipped: Counter[str] = field(default_factory=Counter)  # in a row, by role
    _norms: dict[str, deque[float]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """By role, what its next update is compared with; JSON-able."""
        roles = sorted({*self._norms, *self._skipped})
        return {role: {"norms": [*self._norms.get(role, ())], "skipped": self._skipped[role]} for role in roles}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take back what `state_dict` gave."""
        for role, of in state.items():
            self._norms[role] = deque(of["norms"], maxlen=NORMS)
            self._skipped[role] = of["skipped"]

    def largest(self, role: str) -> float:
        """The largest gradient norm that is not skipped; infinite without `times`, or before `FEWEST` norms."""
        norms = self._norms.setdefault(role, deque(maxlen=NORMS))
        if self.times is None or len(norms) < FEWEST:
            return math.inf
        return self.times * statistics.median(norms)

    def note(self, role: str, norm: float, largest: float, scale: LossScale | None, metrics: StepMetrics) -> None:
        """Log an update and count it as made or skipped: skipped if `norm` is above `largest`, infinite or NaN.

        Args:
            role: The role that is trained.
            norm: Norm of its whole gradient before clipping, the same on all ranks.
            largest: What `largest` returned before the update.
            scale: Loss scale of a float16 role, whose overflows do not count while the scale can fall; else None.
            metrics: Metrics of the step.

        Raises:
            UserError: `most` updates of the role in a row were skipped.
        """
        if scale is not None:
            metrics.number(f"{role}/loss_scale", scale.factor)
        if math.isfinite(norm):
            metrics.number(f"{role}/grad_norm", norm)
            if norm <= largest:
                self._skipped[role] = 0
                if norm > 0:  # where all advantages are 0 there is none
                    self._norms.setdefault(role, deque(maxlen=NORMS)).append(norm)
                return
        metrics.number(f"{role}/skipped_updates", 1.0)
        if scale is not None and scale.can_fall:  # the next update is tried with a smaller one
            return
        how = f"{norm:.3g}, where up to {largest:.3g} is usual," if math.isfinite(norm) else "infinite or NaN"
        remedy = "Lower the learning rate, or look for NaN in rewards and loss"
        self._count(role, f"the gradient of `{role}` was {how}", remedy)

    def note_dropped(self, role: str, metrics: StepMetrics) -> None:
        """Count an update as skipped, because a reward failed on all of its samples, which were dropped.

        Args:
            role: The role that is trained.
            metrics: Metrics of the step.

        Raises:
            UserError: `most` updates of the role in a row were skipped.
        """
        metrics.number(f"{role}/skipped_updates", 1.0)
        self._count(role, f"the reward of `{role}` failed on all samples", "Mend the reward")

    def _count(self, role: str, what: str, remedy: str) -> None:
        """One more update in a row was skipped, for this reason."""
        self._skipped[role] += 1
        if self._skipped[role] >= self.most:
            raise UserError(
                f"{what} in {self._skipped[role]} updates in a row, which were skipped; what was saved before is still"
                f" there. {remedy}"
            )
