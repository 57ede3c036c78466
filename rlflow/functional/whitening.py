"""Shift and scale to mean 0 and standard deviation 1, over one batch or over the batches of many ranks together.

The statistics are three numbers for each row. A caller that gathers them from all ranks can merge them:
`standardize(x, mask, merge_moments(of_all_rows))` whitens over all rows of all ranks, REINFORCE++, arXiv 2501.03262.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.functional.shapes import float_dtype


def row_moments(x: Tensor, mask: Tensor) -> Tensor:
    """Count, mean and sum of squared deviations of each row's entries where `mask` is nonzero: `[B, 3]` float64.

    Detached. The width of the padding changes no bit of the result.

    Args:
        x: `[B]` or `[B, T]`.
        mask: Nonzero on entries that count, shaped as `x`.
    """
    entries, counts = x.detach().double(), mask.bool()
    if x.dim() == 1:
        return torch.stack([counts.double(), entries.where(counts, 0.0), torch.zeros_like(entries)], dim=1)
    number = counts.sum(dim=1).double()
    if not entries.shape[1]:
        return torch.stack([number] * 3, dim=1)
    smallest = entries.where(counts, torch.inf).amin(dim=1).where(number > 0, 0.0)
    above = _sums((entries - smallest[:, None]).where(counts, 0.0))
    means = smallest + above / number.clamp(min=1)
    squares = _sums((entries - means[:, None]).where(counts, 0.0).square())
    return torch.stack([number, means, squares], dim=1)


def merge_moments(parts: Tensor) -> Tensor:
    """The moments `[3]` of all entries together, from the moments of the parts `[R, 3]`. Parts may be empty.

    If all means are equal, the merged mean is exactly this number, and merging adds no deviation. Chan, Golub and
    LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """
    counts, means, squares = parts[parts[:, 0] > 0].unbind(dim=1)
    if not len(means):
        return means.new_zeros(3)
    total, offset = counts.sum(), means.min()
    mean = offset + (counts * (means - offset)).sum() / total
    return torch.stack([total, mean, squares.sum() + (counts * (means - mean).square()).sum()])


def standardize(x: Tensor, mask: Tensor, moments: Tensor, unbiased: bool = True) -> Tensor:
    """`(x - mean) / std` with the given moments, which may be of many ranks. Detached; 0 where the mask is 0.

    If all entries are equal, the result is exactly 0.

    Args:
        x: `[B]` or `[B, T]`.
        mask: Nonzero on entries that count, shaped as `x`.
        moments: `[3]`, from `merge_moments`.
        unbiased: `N - 1` in the variance's denominator instead of `N`.
    """
    count, mean, squares = moments.unbind()
    std = (squares / (count - 1 if unbiased else count).clamp(min=1)).sqrt()
    counts = mask.bool() & (std > 0)
    return ((x.detach().double() - mean) / std).where(counts, 0.0).to(float_dtype(x))


def broken_rows(x: Tensor, mask: Tensor) -> Tensor:
    """True `[B]` at rows of `x` that have an infinite or NaN entry where `mask` is nonzero."""
    broken = ~x.isfinite() & mask.bool()
    return broken if broken.dim() == 1 else broken.any(dim=1)


def not_finite(rows: Tensor) -> UserError:
    """The error for rows `[N]` that cannot be whitened."""
    return UserError(
        f"row {rows[0].item()}, one of {len(rows)}, has an infinite or NaN entry, and whitening by the mean of all rows"
        " would leave none; look at its reward, at the critic's values and at KL"
    )


def _sums(x: Tensor) -> Tensor:
    """The sum of each row `[B]` of `[B, T]`, in halves: zeros after a row change no bit of it, unlike `Tensor.sum`."""
    width = 1 << (x.shape[1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, width - x.shape[1]))
    while width > 1:
        width //= 2
        x = x[:, :width] + x[:, width:]
    return x[:, 0]
