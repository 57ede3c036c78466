"""The models of a module for one run: copies of those that its constructor was given, and those of its config."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from inspect import signature
from typing import Any

from rlflow.dag.node import ROLLOUT
from rlflow.errors import UserError
from rlflow.models.arguments import make_models, model_parameters
from rlflow.models.causal_lm import Averaged, CausalLM, WithoutAdapters
from rlflow.models.handle import ModelHandle
from rlflow.module import RLModule, handles


def configure(module: RLModule) -> None:
    """Give a module the models of a run, and call its `configure_models`.

    What the constructor was given is copied, since a run changes it; what was derived from it is made anew. A model of
    the config takes the place of a given one, and of one that `configure_models` makes.

    Raises:
        UserError: The constructor was given something else than a model, or one of the config has a wrong name.
    """
    make_models(module)
    given, of_run = dict(module.given_models), module.run_models
    for role, handle in handles(module).items():
        if handle is not of_run.get(role):
            given[role] = handle
        elif role in given:
            given[role] = _as_changed(given[role], handle, module.run_settings[role])
        else:
            setattr(module, role, None)
    module.given_models = given
    for role in module.config_models:
        _check_name(module, role)
    chosen = {role: copy(handle) for role, handle in (given | dict(module.config_models)).items()}
    copies = {id(handle): chosen[role] for role, handle in given.items()}
    for role, handle in chosen.items():
        if isinstance(handle, Averaged | WithoutAdapters) and id(handle.owner) in copies:
            owner = copies[id(handle.owner)]
            assert isinstance(owner, CausalLM)
            handle.owner = owner
        setattr(module, role, handle)
    module.configure_models()
    for role in module.config_models:
        setattr(module, role, chosen[role])
    module.run_models = handles(module)
    module.run_settings = {role: _settings(handle) for role, handle in module.run_models.items()}


def _settings(handle: ModelHandle) -> dict[str, Any]:
    """What a user sets of a model; whether it is trained is the run's to change."""
    names = set(signature(type(handle)).parameters) - {"trainable", "owner"}
    return {name: value for name, value in vars(handle).items() if name in names}


def _as_changed(given: ModelHandle, of_run: ModelHandle, before: Mapping[str, Any]) -> ModelHandle:
    """The model as given, with what was changed of its copy since the run before was configured."""
    changed = {name: value for name, value in _settings(of_run).items() if value is not before.get(name)}
    if not changed:
        return given
    model = copy(given)
    for name, value in changed.items():
        setattr(model, name, value)
    return model


def _check_name(module: RLModule, role: str) -> None:
    known = role in model_parameters(type(module)) or not hasattr(type(module), role)
    taken = not known or not isinstance(vars(module).get(role), ModelHandle | None)
    if not role.isidentifier() or role == ROLLOUT or taken:
        why = f"`{role}` of {type(module).__name__} is something else" if taken else "that is no name for a model"
        raise UserError(f"`models.{role}` is given, and {why}; give the model another name, such as `actor`")
