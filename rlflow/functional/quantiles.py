"""Quantiles of numbers that are distributed over many ranks: exact, without gathering the numbers.

The number with `k` others below it is found byte by byte. A float64 that is read as an integer has the order of the
floats. So its first byte follows from how many numbers begin with each of the 256 bytes. Then only numbers that begin
with this byte are counted, by their second byte, and so on, eight times in all. Ranks exchange only counts: 2 KiB for
each byte and each of the two neighbors of a quantile, for any number of tokens. To gather the numbers would take 8
bytes a number on every rank. Nothing is rounded, so the result does not depend on which rank has which number. Nothing
has to converge either, as it would in a bisection of the range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlflow.errors import UserError

_BYTES = 8  # of a float64
_VALUES = 256  # of a byte
_SIGN = torch.iinfo(torch.int64).min


def quantiles(entries: Tensor, q: float | Sequence[float], total: Callable[[Tensor], Tensor]) -> Tensor:
    """The `q`-quantiles of the entries of all parts, interpolated linearly like those of `torch.quantile`.

    Args:
        entries: `[n]` of this part; it may be empty.
        q: Share from 0 to 1, or several.
        total: Function that adds up a tensor over all parts, with the same result on each. With one part, it returns
            the tensor itself.

    Returns:
        0-dim float64, or `[Q]` for several; NaN if no part has an entry.

    Raises:
        UserError: A `q` is not from 0 to 1, or an entry is NaN. All parts raise it.
    """
    shares = torch.tensor(q, dtype=torch.float64)
    if not bool(((shares >= 0) & (shares <= 1)).all()):
        raise UserError(f"a quantile of {q} was asked for; give numbers from 0 to 1")
    entries = entries.detach().double()
    count, missing = total(torch.stack([torch.tensor(len(entries)), entries.isnan().sum().cpu()])).tolist()
    if missing:
        raise UserError(f"a quantile is over {count} numbers, and {missing} of them are NaN; mask them out")
    if not count:
        return torch.full_like(shares, torch.nan)
    place = shares * (count - 1)
    below, above = (_at(entries, end.flatten(), total).view_as(place) for end in (place.floor(), place.ceil()))
    between = torch.lerp(below, above, place - place.floor())
    return torch.where(below == above, below, between)  # of two infinities lerp makes NaN


def _at(entries: Tensor, places: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """The entries `[K]` at the places `[K]`, from 0, in the ascending order of all parts' entries."""
    left = [_ordered(entries)] * len(places)  # of each place, those that begin with the bytes found
    rank = places.long()  # among those of all parts
    found = torch.zeros_like(rank)
    for byte in reversed(range(_BYTES)):
        digits = [(keys >> (8 * byte)) & (_VALUES - 1) for keys in left]
        counts = total(torch.stack([digit.bincount(minlength=_VALUES).cpu() for digit in digits]))  # [K, 256]
        upto = counts.cumsum(dim=1)
        digit = (upto <= rank[:, None]).sum(dim=1)
        rank = rank - (upto - counts).gather(1, digit[:, None])[:, 0]
        found |= digit << (8 * byte)
        left = [keys[of == chosen] for keys, of, chosen in zip(left, digits, digit.tolist(), strict=True)]
    return _numbers(found)


def _ordered(numbers: Tensor) -> Tensor:
    """Int64 that sort as the float64 `numbers` do when their bytes are compared as unsigned, highest byte first."""
    bits = numbers.view(torch.int64)
    return torch.where(bits < 0, ~bits, bits ^ _SIGN)


def _numbers(ordered: Tensor) -> Tensor:
    """The inverse of `_ordered`."""
    return torch.where(ordered < 0, ordered ^ _SIGN, ~ordered).view(torch.float64)
