"""A module as a run left it, for `RLModule.load_from_checkpoint`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlflow import checkpoint
from rlflow.commands.export import export
from rlflow.commands.fit import read_fit
from rlflow.errors import UserError
from rlflow.models.arguments import model_parameters
from rlflow.module import RLModule, handles
from rlflow.run.folder import RunFolder

Module = TypeVar("Module", bound=RLModule)


def load_module(cls: type[Module], path: Path, arguments: Mapping[str, Any]) -> Module:
    """The module of a run with its weights and its state, see `RLModule.load_from_checkpoint`."""
    is_checkpoint = (path / checkpoint.STATE).is_file()
    run = RunFolder(path.parent.parent if is_checkpoint else path)
    module: Module | None = None
    if run.config.is_file():
        found = read_fit(["--config", str(run.config)]).module
        if not isinstance(found, cls):
            raise UserError(f"{run.path} trained {type(found).__name__}, which is no {cls.__name__}; load it by that")
        module, cls = found, type(found)
    state = path if is_checkpoint else next(iter(checkpoint.newest_first(run.path)), None)
    weights = {role: _weights(run, path if is_checkpoint else None, role) for role in _roles(run, state, cls)}
    if not weights:
        raise UserError(f"{str(path)!r} is no folder of a run with a model of {cls.__name__}, and no checkpoint of one")
    if module is None:
        kept = json.loads(run.hparams.read_text()) if run.hparams.is_file() else {}
        module = cls(**{**weights, **kept, **arguments})
    elif arguments:
        names = inspect.signature(cls).parameters
        module = cls(**{**{name: value for name, value in vars(module).items() if name in names}, **arguments})
    for role, handle in handles(module).items():
        if role in weights and role not in arguments:
            handle.model = weights[role]
    if state is not None:
        stored = json.loads((state / checkpoint.STATE).read_text())
        checkpoint.restore_module(module, state, stored["state"]["module"])
    return module


def _roles(run: RunFolder, state: Path | None, cls: type[RLModule]) -> list[str]:
    """The models of the constructor that the run trained."""
    names = [*model_parameters(cls)]
    if state is not None:
        return [name for name in names if (state / f"{name}.json").is_file()]
    lead = [name for name in names if not run.model_of(name).is_dir()][:1] if run.model.is_dir() else []
    return [name for name in names if name in lead or run.model_of(name).is_dir()]


def _weights(run: RunFolder, state: Path | None, role: str) -> str:
    """A folder with the weights of a model at the end of a run, or at a checkpoint."""
    if state is None:
        return str(run.model_of(role) if run.model_of(role).is_dir() else run.model)
    target = run.path / "exported" / f"{state.name}-{role}"
    if not target.is_dir():
        export(state, target, role=role)
    return str(target)
