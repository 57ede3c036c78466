"""The rows of epochs that a module chooses, kept so that a run resumes in the middle of an epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import UserError

REMEMBERED = 1000  # draws whose rows are known: responses that are cut off, and groups left over, are of earlier ones

Choose = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Epoch:
    """The rows of one epoch.

    Attributes:
        number: From 0.
        first_draw: Of the run.
        rows: `[N]` int64, places in the dataset, in the order in which they are drawn.
    """

    number: int
    first_draw: int
    rows: Tensor

    @property
    def digest(self) -> bytes:
        """By which ranks compare what they chose."""
        return hashlib.sha256(self.rows.numpy().tobytes()).digest()


class ChosenRows:
    """Which rows each draw takes, where the module chooses those of an epoch when its first draw begins.

    Args:
        choose: The module's `choose_prompts`.
        shuffled: The rows of an epoch in the order of the seed.
        per_draw: Rows of one draw. An epoch leaves out the rows that fill none.
    """

    def __init__(self, choose: Choose, shuffled: Callable[[int], Tensor], per_draw: int) -> None:
        self._choose, self._shuffled, self._per_draw = choose, shuffled, per_draw
        self._epochs: list[Epoch] = []

    def begin(self, draw: int) -> Epoch | None:
        """Choose the rows of the epoch that this draw begins, and return it; None within an epoch.

        Draws are begun one after another: what the module knows then decides.

        Raises:
            UserError: The module chose fewer rows than a draw takes, or some that it was not offered.
        """
        if self.knows(draw):
            return None
        number, first = (self._epochs[-1].number + 1, self._end(self._epochs[-1])) if self._epochs else (0, 0)
        assert draw == first, f"draw {draw} begins no epoch; the next one begins with draw {first}"
        offered = self._shuffled(number)
        rows = self._choose(number, offered.clone())
        if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype != torch.int64:
            raise UserError(f"`choose_prompts` returned {rows!r:.60}; return rows that it was given, `[N]` int64")
        if not bool(torch.isin(rows, offered).all()):
            raise UserError(f"`choose_prompts` returned row {int(rows[~torch.isin(rows, offered)][0])}, not one given")
        if len(rows) < self._per_draw:
            raise UserError(
                f"`choose_prompts` left {len(rows)} of {len(offered)} prompts for epoch {number + 1}, and a step takes"
                f" {self._per_draw} (`data.prompts_per_step`); let it leave more, or end the run before"
            )
        self._epochs = [epoch for epoch in self._epochs if self._end(epoch) > draw - REMEMBERED]
        self._epochs.append(Epoch(number, draw, rows.cpu()))
        return self._epochs[-1]

    def knows(self, draw: int) -> bool:
        """Whether it is decided which rows the draw takes."""
        return any(epoch.first_draw <= draw < self._end(epoch) for epoch in self._epochs)

    def rows(self, draw: int) -> Tensor:
        """`[per_draw]`: the rows of a draw that is known."""
        for epoch in self._epochs:
            if epoch.first_draw <= draw < self._end(epoch):
                start = (draw - epoch.first_draw) * self._per_draw
                return epoch.rows[start : start + self._per_draw]
        raise UserError(
            f"a node asks for the dataset's rows of draw {draw + 1}, which this rank has not loaded; ask in a node"
            " without a role that reads what a rollout node made"
        )

    def state_dict(self) -> list[dict[str, Any]]:
        """The epochs that are known, JSON-able."""
        return [{**vars(epoch), "rows": epoch.rows.tolist()} for epoch in self._epochs]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Take back what `state_dict` gave."""
        self._epochs = [Epoch(**{**each, "rows": torch.tensor(each["rows"], dtype=torch.int64)}) for each in state]

    def _end(self, epoch: Epoch) -> int:
        """The draw after the epoch's last."""
        return epoch.first_draw + len(epoch.rows) // self._per_draw
