"""The models of a run's checkpoints, written as folders in Hugging Face's or peft's form."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlflow.errors import UserError
from rlflow.storage.stored_role import RoleIndex, StoredRole, index_name

OF_ADAPTER = "base_model.model."  # before a weight's name in peft's files


def is_checkpoint(folder: Path) -> bool:
    """Whether this is the folder of a checkpoint."""
    return os.path.isfile(folder / "state.json")  # False for names that no folder can have


def model_of_checkpoint(checkpoint: Path, role: str, scratch: Path) -> Path:
    """A folder with a role's model as it was at a checkpoint; without this role, `actor`'s, or that of its only role.

    Args:
        checkpoint: The folder of the checkpoint.
        role: The role.
        scratch: Folder in which the model is written. All ranks may call this at the same time.

    Raises:
        UserError: It is not known which role's model is meant; as `of_checkpoint`.
    """
    names = roles_in(checkpoint)
    known = names if len(names) == 1 else [each for each in (role, "actor") if each in names]
    if not known:
        raise UserError(
            f"{checkpoint} has {', '.join(names)}, and neither `{role}` nor `actor`; write one of them by `rlflow"
            f" export --model {checkpoint} --role {names[0]} --to FOLDER`, and give that folder"
        )
    role = known[0]
    to = scratch.joinpath(f"checkpoint-{role}", *checkpoint.resolve().parts[1:])
    if not to.exists():
        with model_folder(to) as draft:
            of_checkpoint(checkpoint, role, None, draft)
    return to


@contextmanager
def model_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write a model into; it gets the name `folder` when the context ends.

    All ranks may write the same model at the same time. The first one to end gives its folder the name.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    yield draft
    try:
        os.rename(draft, folder)
    except OSError:
        # Another rank was first; its folder holds the same bytes.
        if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise
        shutil.rmtree(draft)


def roles_in(checkpoint: Path) -> list[str]:
    """The roles whose weights a checkpoint has."""
    return sorted(path.stem for path in checkpoint.glob("*.json") if "shapes" in json.loads(path.read_text()))


def of_checkpoint(checkpoint: Path, role: str, dtype: torch.dtype | None, to: Path) -> Path:
    """Write a role's weights in a checkpoint as a folder like the run's `model`, in its dtype or this; returns it.

    Raises:
        UserError: The checkpoint has no such role, or the run's folder no model, from which all other files come.
    """
    if not (checkpoint / index_name(role)).is_file():
        raise UserError(
            f"`--role` is {role!r}, and {checkpoint} has {', '.join(roles_in(checkpoint))}; name one of these"
        )
    run = checkpoint.resolve().parents[1]
    like = next((path for path in (run / f"model-{role}", run / "model") if path.is_dir()), None)
    if like is None:
        raise UserError(f"{run} has no `model`, whose config and tokenizer are needed; let the run save its model once")
    index = RoleIndex.read(checkpoint / index_name(role))
    stored = StoredRole(checkpoint, role, index)
    if missing := index.shapes.keys() - {name.removeprefix(OF_ADAPTER) for name in weight_names(like)}:
        raise UserError(
            f"{checkpoint} has `{min(missing)}` of `{role}`, which transformers' files name otherwise; resume from the"
            f" checkpoint, which saves the model at its end, or take {like}, which may be of an earlier step"
        )

    def trained(name: str, tensor: Tensor) -> Tensor:
        name = name.removeprefix(OF_ADAPTER)
        if name not in index.shapes:
            return tensor
        shape = index.shapes[name]
        return stored.read(name, "weight", 0, tensor.numel()).view(shape).to(dtype or tensor.dtype)

    rewrite(like, to, trained)
    return to


def weight_names(folder: Path) -> set[str]:
    """The names of the weights in a model's folder."""
    names = set[str]()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


def rewrite(source: Path, to: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    """Copy a model's folder, with each weight changed; one file of weights at a time is in memory.

    Args:
        source: Folder in Hugging Face's or peft's form.
        to: Folder to write.
        change: Function of a weight's name and value that returns the value to write.
    """
    shutil.copytree(source, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            changed = {name: change(name, file.get_tensor(name)).contiguous() for name in file.keys()}  # noqa: SIM118
            save_file(changed, to / path.name, file.metadata())
    for path in to.glob("*.safetensors.index.json"):
        index = json.loads(path.read_text())
        sizes = [file.stat().st_size for file in to.glob("*.safetensors")]
        index["metadata"] = {**index.get("metadata", {}), "total_size": sum(sizes)}
        path.write_text(json.dumps(index, indent=2) + "\n")
