"""`OverRows`, what a node computes over the rows of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.functional import merge_moments, quantiles, row_moments, standardize
from rlflow.functional.whitening import broken_rows, not_finite
from rlflow.step_context import AllRows, StepContext


class OverRows:
    """Metrics, and numbers over all rows of a step, for the nodes of a module. All ranks of a node call them alike.

    Rows that a reward failed on, and whose `on_error` is `drop`, do not count.
    """

    _context: StepContext | None = None

    def log(self, name: str, x: Tensor, mask: Tensor | None = None) -> None:
        """Log the mean of `x` over all rows of all ranks, or over the entries where `mask` is True.

        Args:
            name: The metric, such as `actor/kl`.
            x: `[B]` or `[B, T]`; 0-dim for a number that is equal on all ranks.
            mask: Of the same shape; needed for `[B, T]`, where padding must not count.
        """
        if x.dim() > 1 and mask is None:
            raise UserError(
                f"log({name!r}) was given {list(x.shape)} without a mask; padding would count. Pass `mask=`"
            )
        if mask is not None and mask.shape != x.shape:
            raise UserError(
                f"log({name!r}) was given {list(x.shape)} with a mask of {list(mask.shape)}; give both one shape"
            )
        self._running().log(name, x, mask)

    def mean(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mean over all rows of all ranks, 0-dim float64; over the entries where `mask` is True if given.

        The same bits on any number of ranks, as of `whiten`: rows are summed by themselves, and then in their order.
        """
        mean: Tensor = self._moments(x, mask)[1]
        return mean

    def whiten(self, x: Tensor, mask: Tensor | None = None, unbiased: bool = True) -> Tensor:
        """Shift and scale `x` to mean 0 and standard deviation 1 over all rows of all ranks; masked entries are 0.

        Args:
            x: `[B]` or `[B, T]`.
            mask: Of the shape of `x`, the entries that count; None for all.
            unbiased: `N - 1` in the variance's denominator instead of `N`.

        Raises:
            UserError: An entry that counts is infinite or NaN, on any rank: all raise it, with the row of the step.
        """
        counts = self._all_of(x, mask)
        statistics = self._moments(x, counts)
        if not statistics.isfinite().all():  # alike on all ranks
            raise not_finite(self.all_rows(broken_rows(x, counts)).nonzero().flatten())
        return standardize(x, counts, statistics, unbiased)

    def quantile(self, x: Tensor, q: float | Sequence[float], mask: Tensor | None = None) -> Tensor:
        """The number below which a share `q` of the entries of all rows of all ranks lies; as `torch.quantile` of all.

        Exact, and the same on any number of ranks; what ranks exchange does not grow with the entries. It
        chooses some tokens of a step, such as those of highest entropy, arXiv 2506.01939.

        Args:
            x: `[B]` or `[B, T]`.
            q: From 0 to 1, or several.
            mask: Of the shape of `x`, the entries that count; needed for `[B, T]`, where padding must not.

        Returns:
            0-dim float64, or `[Q]` for several; NaN where no entry counts.

        Raises:
            UserError: A `q` is not from 0 to 1, or an entry that counts is NaN; on all ranks alike.
        """
        context = self._running()
        entries = x[self._all_of(x, mask).bool()]
        return quantiles(entries, q, lambda counts: context.of_each_shard(counts).sum(dim=0)).to(x.device)

    def all_rows(self, x: AllRows) -> AllRows:
        """The entries `[N]` of all ranks' rows `[B]`, ordered by the rows' ids, the same on every rank.

        Args:
            x: `[B]`, a number a row; or `Ragged`, such as token ids.
        """
        if isinstance(x, Tensor) and x.dim() != 1:
            raise UserError(f"all_rows takes one number a row, `[B]`, or Ragged; it was given {list(x.shape)}")
        return self._running().all_rows(x)

    def dataset_rows(self, group: Tensor) -> Tensor:
        """Places in the dataset `[B]` int64, counted from 0, of prompts as `rollout.group` names them, `[B]`.

        Raises:
            UserError: It was called in a train node or in validation.
        """
        return self._running().dataset_rows(group)

    def _moments(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Count, mean and sum of squared deviations `[3]` of the entries of all ranks."""
        return merge_moments(self._running().all_rows(row_moments(x, self._all_of(x, mask))))

    def _running(self) -> StepContext:
        if self._context is None:
            raise UserError(f"{type(self).__name__}: nodes are run by `Trainer.fit`; there is no step in progress here")
        return self._context

    def _all_of(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The entries that count: those of the mask, of rows that were not dropped."""
        counts = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
        kept = self._running().kept(x)
        return counts if kept is None else counts.bool() & kept.view(-1, *[1] * (x.dim() - 1))
