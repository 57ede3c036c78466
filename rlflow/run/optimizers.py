"""The optimizers that a module's `configure_optimizers` makes; they are checked before any model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rlflow.errors import UserError, about, setting
from rlflow.models.handle import ModelHandle
from rlflow.models.optimizer import GroupedOptimizer, Optimizer
from rlflow.module import RLModule, handles

NAMES = {torch.optim.AdamW: "adamw", torch.optim.SGD: "sgd"}
OWN = ("lr", "initial_lr", "weight_decay", "betas", "eps")  # options in which groups may differ
FORM = 'return a torch optimizer, {"optimizer": ..., "lr_scheduler": {"scheduler": ..., "interval": "step"}}, or a list'


def configure_optimizers(module: RLModule, paths: Mapping[str, Path], dtype: torch.dtype) -> None:
    """Call the module's `configure_optimizers`, if it has one, and set `optimizer` of the models for which it made one.

    Args:
        module: Module with its models configured.
        paths: Folders of the models that are trained, by role.
        dtype: Dtype of forward passes.

    Raises:
        UserError: Its result cannot train these models.
    """
    if type(module).configure_optimizers is RLModule.configure_optimizers:
        return
    models = {role: handles(module)[role] for role in paths}
    for role, handle in models.items():
        with about(handle):
            model = handle.load(paths[role], dtype, torch.device("cpu"), empty=True)
        handle.shown = {weight.name: weight.parameter for weight in model.trained()}
    owners = {parameter: role for role, handle in models.items() for parameter in handle.shown.values()}
    returned = [*_parts(module.configure_optimizers())]
    schedulers = _schedulers(returned)
    made = dict[str, GroupedOptimizer]()
    for given in returned:
        if isinstance(given, torch.optim.Optimizer):
            roles = {owners.get(parameter) for group in given.param_groups for parameter in group["params"]}
            role = roles.pop() or ""
            if not role or roles or role in made:
                raise UserError(
                    f"{type(given).__name__} of `configure_optimizers` is not over the parameters of one model, or"
                    f" another has the same; make one for each of {', '.join(models)} from its `named_parameters()`"
                )
            made[role] = _grouped(role, models[role], given, schedulers.get(id(given)))
    for role, handle in models.items():
        handle.shown = {}
        if role in made:
            handle.optimizer = made[role]
            # A later run finds the settings that the user gave.
            module.run_settings = {**module.run_settings, role: {**module.run_settings[role], "optimizer": made[role]}}


def _schedulers(returned: Sequence[torch.optim.Optimizer | LRScheduler]) -> dict[int, LRScheduler]:
    """The schedulers by the `id` of their optimizer; refuses a scheduler that would not be used."""
    schedulers, optimizers = dict[int, LRScheduler](), {id(each) for each in returned}
    for each in returned:
        if isinstance(each, LRScheduler):
            if id(each.optimizer) not in optimizers - schedulers.keys():
                raise UserError(
                    f"a {type(each).__name__} of `configure_optimizers` is for an optimizer that it does not return, or"
                    " that has another scheduler too; return one for an optimizer, such as a ChainedScheduler"
                )
            schedulers[id(each.optimizer)] = each
    return schedulers


def _parts(returned: Any) -> Iterator[torch.optim.Optimizer | LRScheduler]:
    """The optimizers and schedulers in the result of `configure_optimizers`, in any of Lightning's forms."""
    if isinstance(returned, list | tuple):
        for each in returned:
            yield from _parts(each)
    elif isinstance(returned, Mapping) and returned.keys() <= {"optimizer", "lr_scheduler"}:
        for each in returned.values():
            yield from _parts(each)
    elif isinstance(returned, Mapping) and "scheduler" in returned:
        by, every = returned.get("interval", "epoch"), returned.get("frequency", 1)
        if by != "step" or every != 1 or isinstance(returned["scheduler"], ReduceLROnPlateau):
            raise UserError(
                f"`configure_optimizers` has a {type(returned['scheduler']).__name__} by {every} {by}; a rate changes"
                ' with each update, by a rule: give {"scheduler": ..., "interval": "step"}, and no ReduceLROnPlateau'
            )
        yield returned["scheduler"]
    elif isinstance(returned, torch.optim.Optimizer):
        yield returned
    elif isinstance(returned, LRScheduler):
        yield from _parts({"scheduler": returned})
    elif returned is not None:
        found = " ".join(repr(returned).split())  # an optimizer has several lines
        raise UserError(f"`configure_optimizers` returned {found:.80}; {FORM} of these")


def _grouped(
    role: str, handle: ModelHandle, given: torch.optim.Optimizer, scheduler: LRScheduler | None
) -> GroupedOptimizer:
    settings = handle.optimizer
    assert settings is not None
    shared = {name: getattr(settings, name) for name in ("warmup_steps", "schedule", "interval", "gradient_clipping")}
    defaults = (replace(handle.default_optimizer, **shared), replace(Optimizer(), **shared))
    is_scheduled = settings.warmup_steps > 0 or settings.schedule != "constant"
    for name, is_given in (
        (setting(handle, "optimizer", f"{role}.optimizer"), settings not in defaults),
        (setting(handle, "vision_tower_lr", f"{role}.vision_tower_lr"), handle.vision_tower_lr is not None),
        (f"`warmup_steps` or `schedule` of `{role}.optimizer`", scheduler is not None and is_scheduled),
    ):
        if is_given:
            raise UserError(
                f"{name} is given, and `configure_optimizers` makes the {'scheduler' if scheduler else 'optimizer'} of"
                f" `{role}`; leave one of them out. `gradient_clipping` may be given in any case, and `warmup_steps`,"
                " `schedule` and `interval` without a scheduler"
            )
    kind, names = type(given), {parameter: name for name, parameter in handle.shown.items()}
    return GroupedOptimizer(
        NAMES.get(kind, f"{kind.__module__}.{kind.__qualname__}"),
        lr=float(given.defaults["lr"]),
        given=given,
        groups=[*_groups(role, given, names)],
        scheduler=scheduler,
        **shared,
    )


def _groups(role: str, given: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> Iterator[dict[str, Any]]:
    """Each group's weights by name, and its learning rate; refuses groups that could not be trained or saved."""
    first, left = given.param_groups[0], set(names.values())
    for number, group in enumerate(given.param_groups):
        weights = [names[parameter] for parameter in group["params"]]
        if not weights:
            raise UserError(f"group {number} of `configure_optimizers` for `{role}` has no weights; leave it out")
        for name, value in group.items():
            if name not in ("params", "param_names", *OWN) and value != first[name]:
                raise UserError(
                    f"`{name}` is {first[name]} in group 0 of `configure_optimizers` for `{role}`, and {value} in group"
                    f" {number}; groups may differ in `lr`, `weight_decay`, `betas` and `eps`: give one `{name}`"
                )
        left -= {*weights}
        yield {"weights": weights, "lr": group["lr"]}
    if left:
        raise UserError(
            f"`configure_optimizers` leaves out {len(left)} weights of `{role}`, {min(left)!r} among them; put each in"
            " a group, with `lr` 0 if it is not to change"
        )
