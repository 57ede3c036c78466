"""The metrics of responses, under the name of the node that generated them."""

from __future__ import annotations

import torch

from rlflow.metrics import StepMetrics
from rlflow.values.host_copy import on_host
from rlflow.values.rollout import Rollout


def measure(
    node_id: str, rollout: Rollout, metrics: StepMetrics, sampled: int | None = None, continued: bool = False
) -> None:
    """Lengths, and how many were cut, of this rank's responses that have ended.

    Args:
        node_id: The node.
        rollout: The responses.
        metrics: Of the step.
        sampled: Tokens that were sampled for them; None where that is all of them.
        continued: Whether some may be of several policies.
    """
    rows, tokens = float(len(rollout.lengths)), on_host(rollout.policy_lengths).sum()
    metrics.mean(f"{node_id}/length", tokens, rows)
    metrics.mean(f"{node_id}/truncated", (~rollout.finished).sum(), rows)
    metrics.sum(f"{node_id}/tokens", float(tokens if sampled is None else sampled))
    if continued:
        places = torch.arange(rollout.versions.shape[1], device=rollout.versions.device)
        newer = (rollout.versions > rollout.version[:, None]) & (places < rollout.lengths[:, None])
        metrics.mean(f"{node_id}/continued", newer.any(dim=1).sum(), rows)
