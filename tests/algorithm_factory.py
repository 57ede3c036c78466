"""Algorithms of settings in one mapping, as tests and references name them."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, TypeVar

from rlflow import CausalLM, RLModule

OF_A_MODEL = frozenset(inspect.signature(CausalLM).parameters)
PARTS = {"kl_coef": "kl.coef", "kl_kind": "kl.kind", "kl_in_reward": "kl.in_reward", "kl_target": "kl.target"} | {
    "kl_horizon": "kl.horizon",
    "clip_low": "clip.low",
    "clip_high": "clip.high",
    "dual_clip": "clip.dual",
}

Algorithm = TypeVar("Algorithm", bound=RLModule)


def made(algorithm: type[Algorithm], model: str | Path, *more: Any, **settings: Any) -> Algorithm:
    """An algorithm whose actor is this model, with those of the settings that are a model's.

    Args:
        algorithm: The class.
        model: Model of the actor.
        more: Arguments after the actor.
        settings: Settings of the actor, of the algorithm, and of its parts: `kl_coef` is that of `kl`.
    """
    of_actor = {name: settings.pop(name) for name in OF_A_MODEL & settings.keys()}
    fields = {field.name: field for field in dataclasses.fields(algorithm)}  # type: ignore[arg-type]
    inner: dict[str, dict[str, Any]] = {}
    for name in [name for name in settings if name in PARTS and name not in fields]:
        part, _, key = PARTS[name].partition(".")
        value = settings.pop(name)
        if value is not None or hasattr(fields[part].default, key):  # some clips have no `dual`
            inner.setdefault(part, {})[key] = value
    settings |= {part: dataclasses.replace(fields[part].default, **given) for part, given in inner.items()}  # type: ignore[type-var]
    return algorithm(CausalLM(str(model), **of_actor), *more, **settings)  # type: ignore[call-arg]
