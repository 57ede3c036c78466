"""The trainings: each config at 1 and at 2 ranks, or at as many as its placement has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TRANSFORMERS, VLLM = "rlflow.rollout.TransformersEngine", "rlflow.rollout.VLLMEngine"
WITH_VLLM = ("grpo", "grpo_apart", "grpo_lora", "ppo", "remax")  # with both engines, the others with transformers'
LEAST_PROMPTS, LEAST_SAMPLES = 4, 64  # of a step


@dataclass(frozen=True)
class Case:
    """One config at one number of ranks.

    Attributes:
        config: Path in `configs`, without suffix.
        ranks: Processes that train.
        divisor: Prompts and samples of a step and of an update are fewer by this factor.
        engine: Class of the rollout engine.
    """

    config: str
    ranks: int
    divisor: int
    engine: str = TRANSFORMERS

    @property
    def name(self) -> str:
        """Name of the case's record."""
        return f"{self.config.replace('/', '-')}-{self.ranks}{'-vllm' * (self.engine == VLLM)}"

    @property
    def effort(self) -> tuple[bool, int]:
        """Sort key, quick cases first: to start an engine takes longer than ranks, and they longer than one process."""
        return self.engine == VLLM, self.ranks


def cases_of(configs: Path) -> list[Case]:
    """The cases of every config in a revision's folder of configs."""
    return [case for name, settings in _read(configs) for case in _cases(name, settings)]


def apart(configs: Path) -> dict[str, list[str]]:
    """Configs that are not run at 1 and 2 ranks, or not as they are, by why."""
    found: dict[str, list[str]] = {}
    for name, settings in _read(configs):
        if settings.get("placement"):
            why = f"at {settings['trainer']['devices']} ranks only, which the placement names"
        elif for_gpus(settings):
            why = "for GPUs; with the embedded model, word problems, a reward for length and transformers' engine"
        else:
            continue
        found.setdefault(why, []).append(name)
    return found


def for_gpus(settings: Mapping[str, Any]) -> bool:
    """Whether a config needs what a CPU has not."""
    return bool(settings["trainer"].get("accelerator") == "cuda")


def divisor(prompts: int, group_size: int) -> int:
    """The power of 2 that leaves a step as few prompts and samples as a proof needs."""
    by = 1
    while prompts % (2 * by) == 0 and _enough(prompts // (2 * by), group_size):
        by *= 2
    return by


def values_of(tree: Any, key: str) -> Iterator[Any]:
    """Every value that has this key, at any depth."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield value
            yield from values_of(value, key)
    elif isinstance(tree, list):
        for value in tree:
            yield from values_of(value, key)


def _enough(prompts: int, group_size: int) -> bool:
    return prompts >= LEAST_PROMPTS and prompts * group_size >= LEAST_SAMPLES


def _cases(name: str, settings: Mapping[str, Any]) -> list[Case]:
    ranks = [settings["trainer"]["devices"]] if settings.get("placement") else [1, 2]
    group_size = next(values_of(settings, "group_size"), 1)
    by = divisor(settings["data"]["prompts_per_step"], group_size)
    engines = (TRANSFORMERS, VLLM) if name in WITH_VLLM else (TRANSFORMERS,)
    return [Case(name, number, by, engine) for number in ranks for engine in engines]


def _read(configs: Path) -> list[tuple[str, Any]]:
    paths = sorted(
        {*configs.rglob("*.yaml")} - {*configs.rglob("tests/*.yaml")}
    )  # those of `rlflow test` train nothing
    return [
        (str(path.relative_to(configs).with_suffix("")), yaml.safe_load(path.read_text(encoding="utf-8")))
        for path in paths
    ]
