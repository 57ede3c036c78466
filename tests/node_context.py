"""The context in which a test calls nodes, without an engine and without a run."""

from __future__ import annotations

import torch

from rlflow.context.node_context import NodeContext
from rlflow.databuffer.transport import Transport


def node_context(transport: Transport | None = None, dtype: torch.dtype = torch.float64) -> NodeContext:
    """Context of a node on the CPU; scores are stored nowhere, and nothing can be generated."""
    return NodeContext(
        engines={},
        transport=Transport() if transport is None else transport,
        device=torch.device("cpu"),
        dtype=dtype,
        seed=0,
        stop_token_ids={},
        decode=str,
        encode=lambda text: list(text.encode()),
        written=lambda rows, template: [list(template.format(**row).encode()) for row in rows],
        on_scores=lambda step, rollout, scores: None,
    )
