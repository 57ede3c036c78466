"""A module as a run left it, for `RLModule.load_from_checkpoint`."""

from __future__ import annotations

import inspect
import json
import tempfile
import warnings
from collections.abc import Collection, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

from rlflow import checkpoint
from rlflow.commands.export import export
from rlflow.commands.fit import read_fit
from rlflow.errors import UserError, did_you_mean
from rlflow.models.lora import WEIGHTS as ADAPTER
from rlflow.models.model_arguments import model_parameters
from rlflow.module import RLModule, handles
from rlflow.run.folder import RunFolder
from rlflow.storage.safetensors_files import sha256

DIGITS = 12  # of a digest, in a folder's name

Module = TypeVar("Module", bound=RLModule)


def load_module(cls: type[Module], path: Path, arguments: Mapping[str, Any]) -> Module:
    """The module of a run with its weights and its state, see `RLModule.load_from_checkpoint`."""
    is_checkpoint = (path / checkpoint.STATE).is_file()
    run = RunFolder(path.parent.parent if is_checkpoint else path)
    module: Module | None = None
    if run.config.is_file():
        found = read_fit(["--config", str(run.config)]).module
        if not isinstance(found, cls):
            raise UserError(f"{run.path} trained {type(found).__name__}, not {cls.__name__}; load it by that class")
        module, cls = found, type(found)
    state = path if is_checkpoint else next(iter(checkpoint.newest_first(run.path)), None)
    # Until a run has ended, the checkpoint may be newer than the models: a signal's checkpoint comes without them.
    of_models = state is None or (run.summary.is_file() and not is_checkpoint)
    if not (roles := _roles(run, state, cls)):
        raise UserError(
            f"{str(path)!r} is neither a folder of a run with a model of {cls.__name__}, nor a checkpoint of one; give"
            " the folder of a run that trained one"
        )
    trusted = {} if module is None else {role: each.trust_remote_code for role, each in handles(module).items()}
    weights = {
        role: _weights(run, None if of_models else state, role, trusted.get(role, False))
        for role in roles
        if role not in arguments
    }
    if module is None:
        if weights:
            warnings.warn(
                f"{run.path} has no config, so settings of `{next(iter(weights))}`, such as its temperature and LoRA,"
                " are the defaults; set them in the module that is returned",
                stacklevel=3,
            )
        kept = json.loads(run.hparams.read_text()) if run.hparams.is_file() else {}
        module = cls(**{**weights, **_taken(cls, kept), **_known(cls, arguments)})
    elif arguments:
        module = cls(**{**_arguments_of(module, arguments), **_known(cls, arguments)})
    for role, handle in handles(module).items():
        if role in weights:
            handle.model = weights[role]
    if state is not None:
        stored = json.loads((state / checkpoint.STATE).read_text())
        checkpoint.restore_module(module, state, stored["state"]["module"])
    return module


def _known(cls: type[RLModule], arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments of a constructor as the user gave them.

    Raises:
        UserError: The constructor does not take one.
    """
    if unknown := sorted(arguments.keys() - _taken(cls, arguments).keys()):
        raise UserError(
            f"`load_from_checkpoint` was given `{unknown[0]}`, which {cls.__name__} does not take; leave it out."
            f"{did_you_mean(unknown[0], inspect.signature(cls).parameters)}"
        )
    return arguments


def _taken(cls: type[RLModule], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a constructor takes, by the names of its parameters."""
    parameters = inspect.signature(cls).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in values.items() if takes_any or name in parameters}


def _arguments_of(module: RLModule, given: Collection[str]) -> dict[str, Any]:
    """The arguments of a module's constructor: from `hparams`, and else from attributes of the same names.

    Raises:
        UserError: Neither has one of the arguments that are not `given`.
    """
    cls, found = type(module), _taken(type(module), module.hparams)
    for name, parameter in inspect.signature(cls).parameters.items():
        if name in found or name in given or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name not in vars(module):
            raise UserError(
                f"{cls.__name__} has no attribute `{name}`, so what the run's config gave for it is not known; give"
                f" `{name}` to `load_from_checkpoint` too, or call `save_hyperparameters` in the constructor"
            )
        found[name] = vars(module)[name]
    return found


def _roles(run: RunFolder, state: Path | None, cls: type[RLModule]) -> list[str]:
    """The models of the constructor that the run trained."""
    names = [*model_parameters(cls)]
    if state is not None:
        return [name for name in names if (state / f"{name}.json").is_file()]
    lead = [name for name in names if not run.model_of(name).is_dir()][:1] if run.model.is_dir() else []
    return [name for name in names if name in lead or run.model_of(name).is_dir()]


def _weights(run: RunFolder, state: Path | None, role: str, trust_remote_code: bool) -> str:
    """A folder with the whole model of a role, as the run saved it or at a checkpoint."""
    source = state or (run.model_of(role) if run.model_of(role).is_dir() else run.model)
    if state is None and not (source / ADAPTER).is_file():
        return str(source)
    # The digest in the name: a run that resumed from an earlier step writes others under the same step.
    digest = sha256(source / (ADAPTER if state is None else checkpoint.STATE))[:DIGITS]
    target = run.path / "exported" / f"{source.name}-{role}-{digest}"
    if not target.is_dir():
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="draft-", dir=target.parent) as drafts:
            draft = Path(drafts) / target.name
            with redirect_stdout(None):  # it would name the draft
                export(source, draft, role=role, trust_remote_code=trust_remote_code)
            try:
                draft.rename(target)
            except OSError:
                if not target.is_dir():  # else another rank was first
                    raise
    return str(target)
