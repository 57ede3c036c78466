"""The metrics of responses, under the name of the node that generated them."""

from __future__ import annotations

import torch

from rlflow.metrics import StepMetrics
from rlflow.values.host_copy import on_host
from rlflow.values.rollout import Rollout


def measure(name: str, rollout: Rollout, metrics: StepMetrics, continued: bool) -> None:
    """Lengths, and how many were cut, of this rank's responses that have ended.

    Args:
        name: Of the node.
        rollout: The responses.
        metrics: Of the step.
        continued: Whether some may be of several policies.
    """
    rows, tokens = float(len(rollout.lengths)), on_host(rollout.lengths).sum()
    metrics.mean(f"{name}/length", tokens, rows)
    metrics.mean(f"{name}/truncated", (~rollout.finished).sum(), rows)
    metrics.sum(f"{name}/tokens", float(tokens))
    if continued:
        places = torch.arange(rollout.versions.shape[1], device=rollout.versions.device)
        newer = (rollout.versions > rollout.version[:, None]) & (places < rollout.lengths[:, None])
        metrics.mean(f"{name}/continued", newer.any(dim=1).sum(), rows)
