"""How a loss per token becomes one number, in whole and in parts.

For `l` per token with mask `m`, where `N` counts samples with at least one token, and `S` all samples:

    token-mean                  sum_it m l / sum_it m               DAPO, arXiv 2503.14476
    sequence-mean-token-mean    sum_i (sum_t m l / sum_t m) / N     GRPO, arXiv 2402.03300
    sequence-mean-token-sum     sum_i sum_t m l / N
    constant                    sum_it m l / (max_length S)         Dr. GRPO, arXiv 2503.20783

Every mode is a sum of weighted losses over a count, and neither looks beyond its own rows. So a batch may be cut by
rows over micro-batches and ranks in any way, and its gradient is that of the whole:

    aggregate(whole) = sum over parts of loss_sum(loss, loss_weights(mask, ...)) / sum over parts of loss_count(mask)

Rows without a token, such as responses that `mask_truncated` leaves out, count in `constant` alone: its divisor does
not depend on what was sampled. A loss per sample `[B]`, with the mask of the samples that count `[B]`
(`loss_mask.any(dim=1)`), is averaged over those samples in every mode.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from rlflow.errors import UserError

Aggregation = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"]


def aggregate(loss: Tensor, mask: Tensor, mode: Aggregation, max_length: int | None = None) -> Tensor:
    """The loss of a whole batch as one number, differentiable in `loss`.

    Args:
        loss: `[B, T]` per token, or `[B]` per sample.
        mask: `[B, T]`, nonzero on tokens that count; `[B]` will do for a loss per sample.
        mode: One of the module's equations.
        max_length: The divisor of `constant`, a setting and not the padded width; no other mode reads it.

    Returns:
        0-dim, in the dtype of `loss`; 0 if nothing counts.

    Raises:
        UserError: The mode does not exist, or is `constant` without a positive `max_length`.
    """
    if loss.dim() == 1 and mask.dim() == 2:
        mask = mask.any(dim=1)
    return loss_sum(loss, loss_weights(mask, mode, max_length)) / loss_count(mask, mode).clamp(min=1)


def loss_weights(mask: Tensor, mode: Aggregation, max_length: int | None = None) -> Tensor:
    """What each entry of a loss is multiplied by before the sum; it depends on the entry's own row alone.

    Args:
        mask: `[B, T]` of a loss per token, or `[B]` of a loss per sample; nonzero on what counts.
        mode: As in `aggregate`.
        max_length: As in `aggregate`.

    Returns:
        Of the shape of `mask`, float64, so that a float64 loss loses nothing; 0 where the mask is 0.

    Raises:
        UserError: The mode does not exist, or is `constant` without a positive `max_length`.
    """
    _check(mode, max_length)
    weights = mask.bool().double()
    if weights.dim() == 1:
        return weights
    if mode == "sequence-mean-token-mean":
        return weights / weights.sum(dim=1, keepdim=True).clamp(min=1)
    if mode == "constant":
        assert max_length is not None
        return weights / max_length
    return weights


def loss_sum(loss: Tensor, weights: Tensor) -> Tensor:
    """`sum w l`, 0-dim, summed in float64 and returned in the dtype of `loss`; NaN where `w` is 0 does no harm.

    Args:
        loss: `[B, T]` or `[B]`.
        weights: Of the shape of `loss`, from `loss_weights`.
    """
    assert loss.shape == weights.shape, f"a loss of shape {list(loss.shape)} beside weights {list(weights.shape)}"
    return (loss.where(weights > 0, 0.0) * weights).sum().to(loss.dtype)


def loss_count(mask: Tensor, mode: Aggregation) -> Tensor:
    """What the sum of weighted losses is divided by: tokens for `token-mean`, all samples for `constant`, else those
    with a token.

    Args:
        mask: `[B, T]` of a loss per token, or `[B]` of a loss per sample; nonzero on what counts.
        mode: As in `aggregate`.

    Returns:
        0-dim int64; add up the counts of all parts before dividing.

    Raises:
        UserError: The mode does not exist.
    """
    _check_mode(mode)
    counts = mask.bool()
    if counts.dim() == 2 and mode == "constant":
        return counts.new_tensor(len(counts), dtype=torch.int64)
    return counts.sum() if counts.dim() == 1 or mode == "token-mean" else counts.any(dim=1).sum()


def _check(mode: str, max_length: int | None) -> None:
    _check_mode(mode)
    if mode == "constant" and (max_length is None or max_length < 1):
        raise UserError(
            f"`max_length` is {max_length}; the loss aggregation `constant` divides by it. "
            "Set it to the longest response that is allowed"
        )


def _check_mode(mode: str) -> None:
    if mode not in get_args(Aggregation):
        raise UserError(f"loss aggregation {mode!r} does not exist; choose one of {', '.join(get_args(Aggregation))}")
