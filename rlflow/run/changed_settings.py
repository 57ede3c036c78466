"""What a run is continued with that it was not begun with: settings that change its numbers are reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Sections and settings that change no number, or only how sums are rounded; the rows of `data.train` are compared.
WITHOUT_EFFECT = {"data.train", "data.validation", "logger", "callbacks", "placement", "predict"}
WITHOUT_EFFECT |= {"strategy.init_args.timeout_s"}
TRAINER, MAX_STEPS = "trainer.", "trainer.max_steps"
# The settings of the trainer that change numbers; `max_steps` does where a learning rate ends with the run.
WITH_EFFECT = {MAX_STEPS, "trainer.max_staleness", "trainer.partial_rollout", "trainer.skip_spikes"}
SCHEDULE = ".schedule"
LONGEST = 60  # characters of a value


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> list[str]:
    """A line for each setting that changes the numbers of the steps to come; of another class, the class alone.

    Args:
        before: The config that a checkpoint was written with, as resolved.
        now: Of the run that continues it.
        where: The checkpoint, for the lines.
    """
    followed = any(
        key.endswith(SCHEDULE) and value not in (None, "constant")
        for config in (before, now)
        for key, value in _leaves(config)
    )
    return [
        f"`{key}` is {_shown(new)} and was {_shown(old)} when {where} was written: the steps from here on have other"
        " numbers"
        for key, old, new in _differences(before, now, "")
        if key != MAX_STEPS or followed
    ]


def _differences(before: Any, now: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if before == now or key in WITHOUT_EFFECT or (key.startswith(TRAINER) and key not in WITH_EFFECT):
        return
    nested = isinstance(before, Mapping) and isinstance(now, Mapping)
    if not nested:
        yield key, before, now
    elif before.get("class_path") != now.get("class_path"):
        yield f"{key}.class_path", before.get("class_path"), now.get("class_path")
    else:
        for name in {**before, **now}:
            yield from _differences(before.get(name), now.get(name), f"{key}.{name}".lstrip("."))


def _leaves(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(config, Mapping):
        for name, value in config.items():
            yield from _leaves(value, f"{key}.{name}")
    else:
        yield key, config


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
