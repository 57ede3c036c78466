"""What the ranks of the tests run to load a model, whole or divided from the first byte."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from rlflow.data.layout import Layout
from rlflow.models.handle import ModelHandle
from tests.strategies.update import Stage, all_weights, launch


def load(
    handle: ModelHandle, folder: Path, stage: Stage, precision: str, layout: Layout | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, object]] | None:
    """Weights, buffers and the record of a role as it is loaded, where it lives."""
    strategy = launch(stage, precision)
    if layout is not None:
        strategy.form_groups({"role": layout})
    if not strategy.holds("role"):
        return None
    strategy.setup_role("role", handle, folder)
    model = strategy._roles["role"].model
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    adapters = {name: weight.clone() for bucket in strategy._full(model.trained(), 1) for name, weight in bucket}
    return all_weights(strategy, "role") | adapters, buffers, strategy.untrained_record("role")
