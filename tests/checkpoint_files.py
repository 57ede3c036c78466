"""Checkpoints and models written without a run, and read again."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from rlflow import checkpoint
from rlflow.models.packed import PackedModel
from rlflow.models.shards import divided, write_shard
from rlflow.models.weight_files import shard_name
from rlflow.storage.disk import Disk
from rlflow.storage.draft import Draft
from rlflow.strategies import TrainingStrategy


def write_checkpoint(strategy: TrainingStrategy, folder: Path, step: int, roles: tuple[str, ...] = ("actor",)) -> None:
    """Write a checkpoint of the actor alone or of these roles, by all ranks of the job."""
    rank, nodes = strategy.global_rank, dict.fromkeys(range(strategy.world_size), "here")
    draft = Draft(checkpoint.folder_of(folder / "checkpoint", step), rank, nodes, 60)
    if rank == 0:
        draft.open()
    strategy.barrier()
    with Disk() as disk:
        checkpoint.write_share(draft, disk, strategy, roles)
        checkpoint.leave(draft, disk)
        if rank == 0:
            progress = checkpoint.Progress(step, 0, "rows")
            checkpoint.complete(draft, disk, roles, progress, checkpoint.Retention(2))
    strategy.barrier()


def write_state(folder: Path, stored: dict[str, Any]) -> None:
    """A manifest of these entries, with their digest."""
    digest = hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()
    (folder / checkpoint.STATE).write_text(json.dumps({"sha256": digest, **stored}))


def save(strategy: TrainingStrategy, name: str, folder: Path) -> None:
    """The role's model, by all its ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    with Disk() as disk:
        strategy.save(name, folder, disk)


def write_model(model: PackedModel, weights: dict[str, Tensor], folder: Path) -> None:
    """A model with these weights, in one file."""
    folder.mkdir(parents=True)
    units = divided(model, {name: weight.to("meta") for name, weight in weights.items()}, 1)
    with Disk() as disk:
        write_shard(folder / shard_name(0, 1), "actor", model, units, weights.items(), disk, "model")
        disk.do(partial(model.save_config, folder))


def load_model(folder: Path) -> dict[str, Tensor]:
    """The weights of a model in Hugging Face form, of all its files."""
    files = sorted(folder.glob("model*.safetensors"))
    assert files, folder
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
