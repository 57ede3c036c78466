"""Names that changed since the base: tables, old to new, through which the base of a proof is read.

They are emptied when the base moves on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.unchanged.record import Values

METRICS: Mapping[str, str] = {
    "rollout/under_way": "rollout/unfinished_groups",
    "judge/accuracy": "discriminator/accuracy",
    "judge/grad_norm": "discriminator/grad_norm",
    "judge/loss": "discriminator/loss",
    "judge/lr": "discriminator/lr",
    "judge/real": "discriminator/real",
    "judge/sampled": "discriminator/sampled",
    "reward/judge": "reward/discriminator",
}
"""Metrics and fields of samples."""

CONFIG: Mapping[str, str] = {
    "within": "hsdp_shard_size",
    "partition_within": "hpz_partition_size",
    "skip_spikes": "grad_norm_spike_limit",
    "keep_inputs": "dump_steps",
    "keep_inputs_of": "dump_nodes",
}
"""Keys, by their last part, and paths of classes that a proof writes into a config."""

DEFAULTS: Mapping[str, Any] = {}
"""Settings whose default changed, by dotted key: the base's default, which the configs of today are given."""


def renamed(values: Values, names: Mapping[str, str] = METRICS) -> Values:
    """A record of the base with the names of today."""
    return {place: {names.get(name, name): value for name, value in found.items()} for place, found in values.items()}


def unused(base: Iterable[Values], present: Iterable[Values], names: Mapping[str, str] = METRICS) -> list[str]:
    """Renamings that no run shows: the old name is in no record of the base, or the new one in none of today."""
    before, now = (
        {name for values in records for found in values.values() for name in found} for records in (base, present)
    )
    return [f"{old} -> {new}" for old, new in names.items() if old not in before or new not in now]


def with_defaults(settings: Any, defaults: Mapping[str, Any] = DEFAULTS) -> Any:
    """A config of today with the base's defaults written out; what it sets itself stays."""
    for key, value in defaults.items():
        section, *below = key.split(".")
        place = settings.setdefault(section, {})
        if isinstance(place, str):  # a class without settings
            place = settings[section] = {"class_path": place}
        for name in below[:-1]:
            place = place.setdefault(name, {})
        place.setdefault(below[-1], value)
    return settings
