"""Statistics of each prompt of the dataset, which a module stores from epoch to epoch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.values.host_copy import on_host

_COUNT, _MEAN, _SQUARES = range(3)  # of the numbers of a prompt: how many, their mean, their squared deviations' sum


class PromptMemory:
    """Statistics of numbers for each prompt, such as rewards of its samples: their count, mean and standard deviation.

    It is an attribute of a module, the same on all ranks, and saved in checkpoints. Nodes add numbers by `update`. The
    numbers of a step are counted at the end of the step, so nodes and `choose_prompts` see those of earlier steps.

        self.solved = PromptMemory()                        # in `__init__` or `__post_init__`
        self.solved.update(rollout.group, rewards)          # in a node
        self.solved.mean(prompts)                           # in `choose_prompts`

    Args:
        decay: Weight of a prompt's earlier numbers each time that a later step adds numbers; with 1 all count alike.
    """

    def __init__(self, decay: float = 1.0) -> None:
        if not 0 <= decay <= 1:
            raise UserError(f"`decay` is {decay}; it is a weight from 0 to 1")
        self._decay = decay
        self._moments = torch.zeros(0, 3, dtype=torch.float64)  # [rows, 3], by the row's place in the dataset
        self._record: Callable[[Tensor, Tensor], None] | None = None

    def update(self, group: Tensor, x: Tensor) -> None:
        """Add a number for each row of a node. All ranks of the node must call it.

        Args:
            group: `[B]` int64, the prompt of each row, as in `rollout.group`.
            x: `[B]`, one number for each row.
        """
        if self._record is None:
            raise UserError("a PromptMemory must be an attribute of the module and be updated by a node; do both")
        if group.shape != x.shape or x.dim() != 1:
            raise UserError(
                f"a PromptMemory was given {list(x.shape)} of prompts {list(group.shape)}; give one number a row, [B]"
            )
        self._record(group, x)

    def count(self, prompts: Tensor) -> Tensor:
        """The count of numbers of each prompt, `[N]` float64, on the device of `prompts`.

        Args:
            prompts: `[N]` int64, places in the dataset, from 0. `RLModule.dataset_rows` returns them for
                `rollout.group`.
        """
        return self._of(prompts)[:, _COUNT]

    def mean(self, prompts: Tensor, unseen: float = math.nan) -> Tensor:
        """The mean of the numbers of each prompt, `[N]` float64, on the device of `prompts`.

        Args:
            prompts: Places in the dataset, as in `count`.
            unseen: Result for a prompt without numbers. If a node returns the mean, pass a number: a NaN in the value
                of a node ends the run.
        """
        count, mean, _ = self._of(prompts).unbind(dim=1)
        return mean.where(count > 0, unseen)

    def std(self, prompts: Tensor, unseen: float = math.nan) -> Tensor:
        """The standard deviation of the numbers of each prompt, `[N]` float64, with N - 1 in its denominator.

        It is on the device of `prompts`.

        Args:
            prompts: Places in the dataset, as in `count`.
            unseen: Result for a prompt with fewer than two numbers; see `mean`.
        """
        count, _, squares = self._of(prompts).unbind(dim=1)
        return (squares / (count - 1).clamp(min=1)).sqrt().where(count > 1, unseen)

    def attach(self, record: Callable[[Tensor, Tensor], None]) -> None:
        """Set the function that stores updates until the end of the step; called by the module."""
        self._record = record

    def learn(self, prompts: Tensor, x: Tensor) -> None:
        """Count the numbers of one step. All ranks call it with the same numbers in the same order.

        Args:
            prompts: `[N]` int64, places in the dataset; they may repeat.
            x: `[N]` float64.

        Raises:
            UserError: A number is infinite or NaN.
        """
        if not x.isfinite().all():
            place = int((~x.isfinite()).nonzero()[0])
            raise UserError(
                f"a PromptMemory was given {x[place].item()} of the dataset's row {int(prompts[place])} (from 0);"
                " correct what made the number"
            )
        if not len(prompts):
            return
        rows, of_row = prompts.unique(return_inverse=True)
        self._grow(int(rows[-1]) + 1)

        def sums(values: Tensor) -> Tensor:
            return values.new_zeros(len(rows)).index_add(0, of_row, values)

        count = sums(torch.ones_like(x))
        mean = sums(x) / count
        squares = sums((x - mean[of_row]).square())
        decay = self._decay
        before, mean_before, squares_before = (
            self._moments[rows] * torch.tensor([decay, 1.0, decay], dtype=torch.float64)
        ).unbind(dim=1)
        total, apart = before + count, mean - mean_before  # Chan, Golub and LeVeque 1979
        self._moments[rows] = torch.stack(
            [
                total,
                mean_before + apart * count / total,
                squares_before + squares + apart.square() * before * count / total,
            ],
            dim=1,
        )

    def state_dict(self) -> dict[str, Any]:
        """The statistics, JSON-able."""
        seen = self._moments[:, _COUNT].nonzero()[:, 0]
        return {"prompts": seen.tolist(), "moments": self._moments[seen].tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the statistics from `state_dict`."""
        prompts = torch.tensor(state["prompts"], dtype=torch.int64)
        self._moments = torch.zeros(0, 3, dtype=torch.float64)
        self._grow(int(prompts.max()) + 1 if len(prompts) else 0)
        self._moments[prompts] = torch.tensor(state["moments"], dtype=torch.float64).view(-1, 3)

    def _of(self, prompts: Tensor) -> Tensor:
        """`[N, 3]` on the device of `prompts`, zeros where nothing was seen."""
        rows = on_host(prompts)
        self._grow(int(rows.max()) + 1 if len(rows) else 0)
        return self._moments[rows].to(prompts.device)

    def _grow(self, rows: int) -> None:
        lacking = rows - len(self._moments)
        if lacking > 0:
            self._moments = torch.cat([self._moments, self._moments.new_zeros(lacking, 3)])
