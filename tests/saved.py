"""Checkpoints and models written without a run, and read again."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from rlflow import checkpoint
from rlflow.storage.disk import Disk
from rlflow.strategies import TrainingStrategy


def write_checkpoint(strategy: TrainingStrategy, folder: Path, step: int) -> None:
    """Of the actor, by all ranks of the job."""
    rank, nodes = strategy.global_rank, dict.fromkeys(range(strategy.world_size), "here")
    draft = checkpoint.draft_of(folder / "checkpoint", step)
    if rank == 0:
        draft.open()
    strategy.barrier()
    with Disk() as disk:
        checkpoint.write_share(draft, disk, strategy, ["actor"], nodes, rank)
        if rank == 0:
            progress = checkpoint.Progress(step, step, 0, "rows", step)
            checkpoint.complete(draft, disk, ["actor"], progress, nodes, timeout_s=60, keep=2)
    strategy.barrier()


def save(strategy: TrainingStrategy, name: str, folder: Path) -> None:
    """The role's model, by all its ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    with Disk() as disk:
        strategy.save(name, folder, disk)


def load_model(folder: Path) -> dict[str, Tensor]:
    """The weights of a model in Hugging Face form, of all its files."""
    files = sorted(folder.glob("model*.safetensors"))
    assert files, folder
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
