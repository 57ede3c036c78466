"""What the ranks of the tests run where ranks divide each layer."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from rlflow.models.optimizer import Optimizer
from rlflow.strategies import FSDPStrategy
from rlflow.values.layout import Layout
from tests.forks import wide_casts
from tests.strategies.update import Outcome, Stage, launch, update


class FSDPInFloat64(FSDPStrategy):
    """FSDP that computes and sums in float64."""

    precisions = {"fp64": torch.float64}  # type: ignore[assignment]


def layout(size: int, sequences: int = 1) -> Layout:
    """All ranks, by so many to a layer and so many to a sequence."""
    world = dist.get_world_size()
    return Layout(tuple(range(world)), world // size // sequences, tensor_parallel_size=size)


def divided_update(
    folder: Path, size: int, optimizer: Optimizer, precision: str = "fp32", sequences: int = 1, checkpointing: bool = False
) -> Outcome:
    """Two updates of a role, with so many ranks to a layer and so many to a sequence."""
    if precision == "fp64":
        strategy = FSDPInFloat64(precision)  # type: ignore[arg-type]
        Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy.processes).launch()
        strategy.form_groups({"actor": layout(size, sequences)})
        with wide_casts():
            return update(strategy, folder, optimizer, 2, checkpointing)
    strategy = launch("fsdp", precision)
    strategy.form_groups({"actor": layout(size, sequences)})
    return update(strategy, folder, optimizer, 2, checkpointing)
