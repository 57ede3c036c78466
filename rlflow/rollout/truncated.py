"""Which tokens count where responses that were cut are left out of losses, `mask_truncated`."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlflow.values.rollout import Rollout


def without_truncated(rollout: Rollout) -> Rollout:
    """The responses, of which those that were cut have no token in the loss mask but inherited ones, which were not."""
    kept = rollout.finished[:, None] | rollout.inherited_mask
    return replace(rollout, loss_mask=rollout.loss_mask & kept)


def to_be_continued(rollout: Rollout, longest: int) -> Rollout:
    """The responses, of which those that may grow to `longest` tokens have their own back in the loss mask.

    They were cut to be continued, and not by that length.
    """
    grows = ~rollout.finished & (rollout.lengths < longest)
    places = torch.arange(rollout.loss_mask.shape[1], device=rollout.loss_mask.device)
    own = (places < rollout.lengths[:, None]) & ~rollout.inherited_mask
    return replace(rollout, loss_mask=rollout.loss_mask | (own & grows[:, None]))
