"""A machine's constants from what it was seen to take: steps of one rank at several sizes, and bare operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.memory.workload import Workload
from rlflow.simulate.designs import node_seconds, works
from rlflow.simulate.hardware import Hardware

STEP = "step"  # the whole of it, among the seconds of its parts


@dataclass(frozen=True)
class Measured:
    """A step of one rank.

    Attributes:
        workload: What was done.
        seconds: Seconds of each node, of `sync`, and of the whole `step`.
    """

    workload: Workload
    seconds: Mapping[str, float]


def calibrated(bare: Hardware, steps: Sequence[Measured]) -> Hardware:
    """`bare` with the constants of compute and of fixed costs with which it takes what `steps` took.

    Each kind of node has two constants, its rate and its fixed cost, so `steps` are of two sizes or more; of more, the
    constants with the least relative errors. None is negative.

    Args:
        bare: With bandwidths, memory and peak as measured, and no fixed costs.
        steps: Of one rank.
    """
    kinds = {node.id: node.kind for node in steps[0].workload.graph.order}
    host = [node.id for node in steps[0].workload.graph.order if node.role is None and node.kind != "rollout"]
    scored = [name for name, kind in kinds.items() if kind not in ("rollout", "train") and name not in host]
    trained = [name for name, kind in kinds.items() if kind == "train"]
    sampled = [name for name, kind in kinds.items() if kind == "rollout"]
    machine = bare
    machine = _fitted(machine, steps, scored, ("forward_efficiency", "micro_batch_seconds"))
    machine = _fitted(machine, steps, trained, ("train_efficiency", "update_seconds"))
    machine = _fitted(machine, steps, sampled, ("response_seconds", "decode_overhead"))
    machine = _fitted(machine, steps, host, ("row_seconds",))
    machine = _fitted(machine, steps, ["sync"], ("sync_seconds",))
    parts = [sum(step.seconds.get(name, 0.0) for name in (*kinds, "sync")) for step in steps]
    beside = float(np.median([step.seconds[STEP] - part for step, part in zip(steps, parts, strict=True)]))
    return replace(machine, step_seconds=max(beside, 0.0))


def as_yaml(machine: Hardware, sharing: Mapping[int, float]) -> str:
    """What `--hardware` reads."""
    numbers = {name: value for name, value in asdict(machine).items() if name != "sharing"}
    lines = [f"{name}: {float(value):.6e}" for name, value in numbers.items() if name != "gpus_per_node"]
    shares = ", ".join(f"{ranks}: {factor:.3f}" for ranks, factor in sharing.items())
    return "\n".join([*lines, f"gpus_per_node: {machine.gpus_per_node}", f"sharing: {{{shares}}}", ""])


def _fitted(machine: Hardware, steps: Sequence[Measured], names: Sequence[str], constants: Sequence[str]) -> Hardware:
    """`machine` with the constants on which the seconds of these nodes depend, each of which they are linear in."""
    pairs = [(step, name) for step in steps for name in names if step.seconds.get(name, 0.0) > 0]
    if not pairs:
        return machine
    seen = np.array([step.seconds[name] for step, name in pairs])

    def predicted(**values: float) -> NDArray[np.float64]:
        changed = _with(machine, values)
        return np.array([node_seconds(works(step.workload, changed, "rlflow"))[name] for step, name in pairs])

    base, columns = predicted(**{constant: _free(constant) for constant in constants}), []
    for constant in constants:
        zero = {other: _free(other) for other in constants}
        if constant.endswith("_efficiency"):  # seconds grow with its inverse
            columns.append(predicted(**{**zero, constant: 0.5}) - base)
        else:
            columns.append(predicted(**{**zero, constant: 1.0}) - base)
    for constant, column in zip(constants, columns, strict=True):
        base = base - column if constant.endswith("_efficiency") else base
    found = _not_negative(np.array(columns).T / seen[:, None], (seen - base) / seen)
    values = {
        constant: 1 / max(value, 1.0) if constant.endswith("_efficiency") else value
        for constant, value in zip(constants, found, strict=True)
    }
    return _with(machine, values)


def _with(machine: Hardware, values: Mapping[str, float]) -> Hardware:
    changed: dict[str, Any] = {**values}
    return replace(machine, **changed)


def _free(constant: str) -> float:
    return 1.0 if constant.endswith("_efficiency") else 0.0


def _not_negative(columns: NDArray[np.float64], seen: NDArray[np.float64]) -> list[float]:
    """The factors of one or two columns that come nearest to `seen`, none of them below 0."""
    found = np.linalg.lstsq(columns, seen, rcond=None)[0]
    if (found >= 0).all():
        return [float(value) for value in found]
    alone = [max(float(column @ seen / (column @ column)), 0.0) if column.any() else 0.0 for column in columns.T]
    errors = [float(np.linalg.norm(column * value - seen)) for column, value in zip(columns.T, alone, strict=True)]
    nearest = int(np.argmin(errors))
    return [value if place == nearest else 0.0 for place, value in enumerate(alone)]
