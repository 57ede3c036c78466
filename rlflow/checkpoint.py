"""Checkpoints that a run continues from to the bit: safetensors by parameter name, and JSON. No pickle.

    checkpoint/step-00000020/
      state.json                      step, policy version, what the run was started with, callbacks, module, all files
      actor.json                      updates done, and what the role's state belongs to
      actor-00000-of-00002.safetensors    rank 0's ranges of `<Hugging Face name>/weight`, `.../exp_avg`, ...
      actor-00001-of-00002.safetensors
      surplus*, under-way*, step-*    groups beyond a step's, cut off, and generated ahead, see `rlflow.data.surplus`

Every rank of a role writes the ranges of flattened tensors that it holds, and any ranks at any ZeRO stage read theirs.
What is drawn (rows, mini-batches, samples) is a function of (seed, step, draw), so no generator's state is kept.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlflow.data.kept import Kept
from rlflow.data.layout import Layout
from rlflow.data.surplus import write_kept
from rlflow.errors import UserError
from rlflow.models.part import Part

FORMAT = 6
STATE = "state.json"
_NAME = re.compile(r"step-\d{8}")


class Trained(Protocol):
    """The strategy, as far as checkpoints need it."""

    def layout(self, name: str) -> Layout: ...

    def holds(self, name: str) -> bool: ...

    def leads(self, name: str) -> bool: ...

    def state_parts(self, name: str) -> Iterable[tuple[str, torch.Size, dict[str, Part]]]: ...

    def load_state_parts(self, name: str, stored: Stored, updates_done: int) -> None: ...

    def untrained_record(self, name: str) -> dict[str, Any]: ...

    def updates_done(self, name: str) -> int: ...

    def barrier(self) -> None: ...


@dataclass(frozen=True)
class Progress:
    """Where a run stands, and what it must be continued with.

    Attributes:
        step: Steps done.
        version: Of the followed role's weights.
        seed: Of the run.
        data: Digest of the training rows.
        draws: How often prompts were drawn.
        before: Validation before the first step.
        module: The module's own state.
        callbacks: The callbacks' states, in order.
    """

    step: int
    version: int
    seed: int
    data: str
    draws: int
    before: dict[str, float] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    callbacks: list[dict[str, Any]] = field(default_factory=list)


def write(
    folder: Path,
    strategy: Trained,
    roles: Iterable[str],
    progress: Progress,
    rank: int,
    world_size: int,
    kept: Mapping[str, Kept] | None = None,
    logged: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Write a checkpoint into `folder`, and remove all but the last `keep`; called by all ranks of the job.

    It gets its name when it is complete, so a run that is killed meanwhile leaves the ones before. Checkpoints of later
    steps, which a run left that was continued from before them, are removed too.

    Args:
        folder: Of all checkpoints.
        strategy: Holds the roles.
        roles: All trained roles, those that live on other ranks too.
        progress: Where the run stands; rank 0's is written.
        rank: This one.
        world_size: Of the job.
        kept: Rows of later steps by the name to write them under: a filter's surplus, and steps that are under way.
        logged: What this rank logged of steps that are under way, JSON-able.
        keep: Checkpoints, this one included.
    """
    name = f"step-{progress.step:08d}"
    draft = folder / f"{name}.draft"
    if rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    strategy.barrier()
    for role in filter(strategy.holds, roles):
        share: dict[str, Tensor] = {}
        ranges: dict[str, str] = {}
        for parameter, shape, parts in strategy.state_parts(role):
            for kind, part in parts.items():
                share[f"{parameter}/{kind}"] = part.values.detach().cpu().clone()
                ranges[f"{parameter}/{kind}"] = json.dumps({"start": part.start, "shape": list(shape)})
        save_file(share, draft / f"{role}-{rank:05d}-of-{world_size:05d}.safetensors", ranges)
        if strategy.leads(role):
            record = {"updates": strategy.updates_done(role), "untrained": strategy.untrained_record(role)}
            (draft / f"{role}.json").write_text(json.dumps(record, indent=2) + "\n")
    if logged:
        (draft / f"logged-{rank:05d}-of-{world_size:05d}.json").write_text(json.dumps(logged))
    for kept_as, rows in (kept or {}).items():
        write_kept(draft, kept_as, rows, world_size)
    strategy.barrier()
    if rank == 0:
        files = {file.name: file.stat().st_size for file in sorted(draft.iterdir())}
        stored = {"format": FORMAT, **asdict(progress), "files": files}
        (draft / STATE).write_text(json.dumps(stored, indent=2) + "\n")
        shutil.rmtree(folder / name, ignore_errors=True)
        draft.rename(folder / name)
        earlier = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.name <= name)
        stays = [path for path in earlier if _lacks(path) is None][-keep:]
        for other in folder.glob("step-*"):
            if other not in stays:
                shutil.rmtree(other)
    strategy.barrier()
    return folder / name


def read_logged(folder: Path, rank: int, world_size: int) -> list[Any]:
    """What `write` was given to be logged, of as many ranks as wrote it, shared out among the ranks of now."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("logged-*.json"))[rank::world_size]]


def find(path: str, run_dir: Path) -> Path:
    """The checkpoint that `trainer.ckpt_path` names: `last` of the run's own folder, or a checkpoint's folder.

    Raises:
        UserError: There is none.
    """
    if path == "last":
        named = sorted(found for found in (run_dir / "checkpoint").glob("step-*") if _NAME.fullmatch(found.name))
        lacking = {found: _lacks(found) for found in reversed(named)}
        complete = [found for found, what in lacking.items() if what is None]
        if not complete:
            of_last = f" that is complete ({named[-1].name} has {lacking[named[-1]]})" if named else ""
            raise UserError(
                f"`trainer.ckpt_path` is `last`, but {run_dir} has no checkpoint{of_last}; leave it out to start anew"
            )
        return complete[0]
    folder = Path(path)
    what = _lacks(folder)
    if what is not None:
        raise UserError(f"`trainer.ckpt_path` is {path!r}, which has {what}; give a checkpoint's folder, or `last`")
    return folder


def _lacks(folder: Path) -> str | None:
    """What of a checkpoint is not there, or not whole; None if all is."""
    try:
        stored = json.loads((folder / STATE).read_text())
        files = stored["files"] if stored["format"] == FORMAT else {}  # of another format, `read_progress` says so
    except (OSError, ValueError, KeyError, TypeError):
        return f"no {STATE}"
    for name, size in files.items():
        file = folder / name
        if not file.is_file():
            return f"no {name}"
        if file.stat().st_size != size:
            return f"{file.stat().st_size:,} of the {size:,} bytes of {name}"
    return None


def read_progress(folder: Path, seed: int, data: str) -> Progress:
    """Where the checkpointed run stood.

    Args:
        folder: Of the checkpoint.
        seed: Of the run that is to continue it.
        data: Digest of that run's training rows.

    Raises:
        UserError: It cannot be continued by this run: another format, seed or dataset.
    """
    stored = json.loads((folder / STATE).read_text())
    if (version := stored.pop("format")) != FORMAT:
        raise UserError(f"{folder} has the checkpoint format {version}; this version of rlflow reads format {FORMAT}")
    del stored["files"]
    progress = Progress(**stored)
    if progress.seed != seed:
        raise UserError(f"`seed` is {seed}, but {folder} was made with {progress.seed}; continue with the same seed")
    if progress.data != data:
        raise UserError(f"the training rows are not those that {folder} was made with; continue with the same `data`")
    return progress


def restore(folder: Path, strategy: Trained, roles: Iterable[str]) -> None:
    """Bring every trained role of this rank to where it stood; called by all ranks.

    Args:
        folder: Of the checkpoint.
        strategy: Holds the roles.
        roles: All trained roles, those that live on other ranks too.

    Raises:
        UserError: The checkpoint lacks what a role needs, or was made with other adapters or on another model.
    """
    for role in filter(strategy.holds, roles):
        path = folder / f"{role}.json"
        if not path.is_file():
            raise UserError(
                f"{folder} has no state of `{role}`, which this run trains; continue with the same `module`"
            )
        record = json.loads(path.read_text())
        _require_same(role, found=strategy.untrained_record(role), stored=record["untrained"])
        strategy.load_state_parts(role, Stored(folder, role), record["updates"])


def _require_same(role: str, found: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Adapters fit to the model that they were trained on alone, and to none of another shape."""
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


class Stored:
    """The ranges of one role's tensors in a checkpoint, read when they are asked for."""

    def __init__(self, folder: Path, role: str) -> None:
        self._folder, self._role = folder, role
        self._shapes: dict[str, torch.Size] = {}
        self._pieces: dict[str, dict[str, list[tuple[int, int, Path]]]] = {}  # by parameter, then kind
        for path in sorted(folder.glob(f"{role}-*-of-*.safetensors")):
            with safe_open(path, "pt") as file:
                for key, text in file.metadata().items():
                    parameter, kind = key.rsplit("/", 1)
                    found = json.loads(text)
                    self._shapes[parameter] = torch.Size(found["shape"])
                    (length,) = file.get_slice(key).get_shape()
                    pieces = self._pieces.setdefault(parameter, {}).setdefault(kind, [])
                    pieces.append((found["start"], length, path))

    def require(self, shapes: dict[str, torch.Size], kinds: Iterable[str]) -> None:
        """See `StoredState.require`."""
        for parameter, shape in shapes.items():
            if parameter not in self._shapes:
                raise UserError(f"{self._folder} has no `{parameter}` of role `{self._role}`; is it of another model?")
            if self._shapes[parameter] != shape:
                raise UserError(
                    f"`{parameter}` of role `{self._role}` is {list(self._shapes[parameter])} in {self._folder} and"
                    f" {list(shape)} in this run; continue with the same `model`"
                )
            if (stored := {*self._pieces[parameter]}) != {*kinds}:
                raise UserError(
                    f"role `{self._role}`: stored are {', '.join(sorted(stored))} of a weight, but this optimizer keeps"
                    f" {', '.join(kinds)}; continue with the same `optimizer`"
                )

    def read(self, parameter: str, kind: str, start: int, length: int) -> Tensor:
        """See `StoredState.read`."""
        found: list[Tensor] = []
        for first, count, path in sorted(self._pieces[parameter][kind], key=lambda piece: piece[0]):
            low, high = max(start, first), min(start + length, first + count)
            if low < high:
                with safe_open(path, "pt") as file:
                    found.append(file.get_slice(f"{parameter}/{kind}")[low - first : high - first])
        return torch.cat(found) if found else torch.empty(0)
