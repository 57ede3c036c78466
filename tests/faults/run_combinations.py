"""A few kinds of runs in which every two choices occur together, and points to kill them at, each at least once."""

from __future__ import annotations

import itertools
from collections import Counter

from tests.faults.killed_runs import POINTS, Kind

CHOICES: dict[str, tuple[object, ...]] = {
    "algorithm": ("grpo", "ppo", "dapo", "partial", "turns"),
    "place": ("one", "together", "apart", "overlapping"),
    "strategy": ("single", "zero0", "zero1", "zero2", "zero3", "fsdp"),
    "engine": ("transformers", "vllm"),
    "async_save": (False, True),
}
NODES = ("rollout", "rewards", "advantages", "actor_loss")
OF_PPO = ("values", "ref_logprobs", "critic_loss")
COUNT = 48


def is_possible(kind: Kind) -> bool:
    """Whether there is such a run, and it takes seconds."""
    if kind.strategy == "single" and kind.place != "one":
        return False
    return kind.engine == "transformers" or kind.algorithm in ("grpo", "ppo")


def kinds() -> list[Kind]:
    """Greedily: each next kind has the most pairs of choices that none before it has; the first of equals."""
    possible = [
        kind for kind in (Kind(*chosen) for chosen in itertools.product(*CHOICES.values())) if is_possible(kind)
    ]  # type: ignore[arg-type]
    missing = {pair for kind in possible for pair in pairs(kind)}
    found = []
    while missing:
        best = max(possible, key=lambda kind: len(missing & pairs(kind)))
        missing -= pairs(best)
        found.append(best)
    return found


def pairs(kind: Kind) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """Pairs of its choices."""
    chosen = [(name, getattr(kind, name)) for name in CHOICES]
    return set(itertools.combinations(chosen, 2))


def points(kind: Kind) -> list[str]:
    """Points that a run of this kind passes."""
    nodes = [*NODES, *(OF_PPO if kind.algorithm == "ppo" else ())]
    if kind.algorithm == "turns":
        nodes.remove("rewards")
    found = [f"{when} {node}" for node in nodes for when in ("before", "after")]
    found += [point for point in POINTS if _comes_by(point, kind)]
    return [*found, "end of a step", "at reduce", "after a weight sync"] + ["after validation"] * (
        kind.algorithm != "turns"
    )


def _comes_by(point: str, kind: Kind) -> bool:
    if kind.algorithm == "turns":
        return point not in ("in a reward", "in a rollout", "in a validation")
    return point != "in a turn of an environment"


def runs() -> list[tuple[Kind, str]]:
    """A kind and a point each: all kinds, all points, each point as rarely as can be."""
    every, times = kinds(), Counter[str]()
    found = []
    for number in range(max(COUNT, len(every))):
        kind = every[number % len(every)]
        there = [point for point in points(kind) if (kind, point) not in found]
        rarest = min(there, key=lambda point: (times[point], _of_few(point)))
        times[rarest] += 1
        found.append((kind, rarest))
    return found


def _of_few(point: str) -> int:
    """Points that few kinds come by are taken first."""
    return 0 if any(node in point for node in OF_PPO) or "environment" in point else 1
