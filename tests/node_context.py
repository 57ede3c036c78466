"""The context in which a test calls nodes, without an engine and without a run."""

from __future__ import annotations

import torch

from rlflow.controller.context import NodeContext
from rlflow.databuffer.transport import Transport
from rlflow.metrics import Metrics


def node_context(
    transport: Transport | None = None, metrics: Metrics | None = None, dtype: torch.dtype = torch.float64
) -> NodeContext:
    """On the CPU; what is scored is kept nowhere, and nothing can be generated."""
    return NodeContext(
        engine=None,
        transport=Transport() if transport is None else transport,
        metrics=Metrics() if metrics is None else metrics,
        device=torch.device("cpu"),
        dtype=dtype,
        seed=0,
        stop_token_ids=(),
        decode=str,
        on_scores=lambda rollout, scores: None,
    )
