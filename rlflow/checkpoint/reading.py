"""Reads a checkpoint: each rank reads the ranges of the roles' tensors that it holds, and the rest of the state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from rlflow.checkpoint.manifest import MODULE, OF_RANK
from rlflow.errors import UserError
from rlflow.storage.stored_role import RoleIndex, StoredRole, index_name
from rlflow.strategies.strategy import TrainingStrategy


def restore(folder: Path, strategy: TrainingStrategy, roles: Iterable[str]) -> None:
    """Load weights, optimizer state and counters of every trained role of this rank; called by all ranks.

    The number of ranks and the strategy may differ from those that wrote the checkpoint.

    Args:
        folder: The checkpoint's folder.
        strategy: The strategy that holds this rank's roles, already loaded.
        roles: All trained roles, also those on other ranks.

    Raises:
        UserError: The checkpoint lacks what a role needs, or was made with other adapters, another model or another
            optimizer.
    """
    for role in filter(strategy.holds, roles):
        path = folder / index_name(role)
        if not path.is_file():
            raise UserError(
                f"{folder} has no state of `{role}`, which this run trains; continue with the same `module`"
            )
        index = RoleIndex.read(path)
        _require_same(role, found=strategy.roles[role].model.untrained_record(), stored=index.untrained)
        strategy.load_state_parts(role, StoredRole(folder, role, index), index.updates, index.loss_scale)


def _require_same(role: str, found: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raise a `UserError` unless adapters are restored on the model and with the `lora` that they were trained with."""
    for key in sorted({*found, *stored}):
        if found.get(key) == stored.get(key):
            continue
        if not (found and stored):
            had, has = ("adapters", "none") if stored else ("no adapters", "some")
            raise UserError(f"the checkpoint's `{role}` has {had}, this run's {has}; continue with the same `lora`")
        if key == "base":
            raise UserError(
                f"the checkpoint's adapters of `{role}` were trained on other weights than this run's `model` has, or"
                " in another precision; continue with the same `model` and `strategy.precision`"
            )
        raise UserError(
            f"`lora.{key}` of `{role}` is {found[key]}, but the checkpoint has {stored[key]}; continue with the same"
        )


def read_module_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of the module's state in a checkpoint, by name, from the files of all ranks."""
    files = sorted(folder.glob(f"{MODULE}-*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def read_of_rank(folder: Path, rank: int, world_size: int) -> list[Any]:
    """The states that ranks wrote for themselves alone, dealt to this run's ranks: every `world_size`-th to `rank`.

    With as many ranks as wrote the checkpoint, each rank gets its own state, in a list of one. With more ranks, some
    get none.
    """
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"{OF_RANK}-*.json"))[rank::world_size]]
