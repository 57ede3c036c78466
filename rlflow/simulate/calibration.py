"""A machine's constants from measurements: steps of one rank at several sizes, and bare operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.memory.workload import Workload
from rlflow.simulate.designs import node_seconds, works
from rlflow.simulate.hardware import Hardware

STEP = "step"  # the whole of it, among the seconds of its parts


# A step of one rank: what was done, and the seconds of each node, of `sync`, and of the whole `step`.
Measured = tuple[Workload, Mapping[str, float]]


def calibrated(bare: Hardware, steps: Sequence[Measured]) -> Hardware:
    """`bare` with constants of compute and fixed costs that reproduce the measured seconds of `steps`.

    Each kind of node has two constants, its rate and its fixed cost, so `steps` are of two sizes or more; of more, the
    constants with the least relative errors. None is negative.

    Args:
        bare: Hardware with bandwidths, memory and peak as measured, and no fixed costs.
        steps: Workloads of steps of one rank, with the seconds that were measured.
    """
    nodes = steps[0][0].graph.order
    sampled = [node.id for node in nodes if node.kind == "rollout"]
    trained = [node.id for node in nodes if node.kind == "train"]
    host = [node.id for node in nodes if node.role is None and node.id not in sampled]
    scored = [node.id for node in nodes if node.id not in (*sampled, *trained, *host)]
    machine = bare
    machine = _fitted(machine, steps, scored, ("forward_efficiency", "micro_batch_seconds"))
    machine = _fitted(machine, steps, trained, ("train_efficiency", "update_seconds"))
    machine = _fitted(machine, steps, sampled, ("response_seconds", "decode_overhead"))
    machine = _fitted(machine, steps, host, ("row_seconds",))
    machine = _fitted(machine, steps, ["sync"], ("sync_seconds",))
    parts = [*(node.id for node in nodes), "sync"]
    unexplained = [seconds[STEP] - sum(seconds.get(name, 0.0) for name in parts) for _, seconds in steps]
    return replace(machine, step_seconds=max(float(np.median(unexplained)), 0.0))


def as_yaml(machine: Hardware, sharing: Mapping[int, float]) -> str:
    """The hardware as YAML, which `--hardware` reads."""
    numbers = {name: value for name, value in asdict(machine).items() if name != "sharing"}
    counts = ("gpus_per_node", "max_num_seqs")
    lines = [f"{name}: {value if name in counts else f'{float(value):.6e}'}" for name, value in numbers.items()]
    shares = ", ".join(f"{ranks}: {factor:.3f}" for ranks, factor in sharing.items())
    return "\n".join([*lines, f"sharing: {{{shares}}}", ""])


def _fitted(machine: Hardware, steps: Sequence[Measured], names: Sequence[str], constants: Sequence[str]) -> Hardware:
    """`machine` with the constants on which the seconds of these nodes depend; they are linear in each constant."""
    pairs = [
        (workload, name, seconds[name]) for workload, seconds in steps for name in names if seconds.get(name, 0.0) > 0
    ]
    if not pairs:
        return machine
    seen = np.array([seconds for _, _, seconds in pairs])
    rates = [constant.endswith("_efficiency") for constant in constants]  # seconds grow with their inverse
    free: dict[str, Any] = {constant: 1.0 if rate else 0.0 for constant, rate in zip(constants, rates, strict=True)}

    def predicted(values: dict[str, Any]) -> NDArray[np.float64]:
        changed = replace(machine, **values)
        return np.array([node_seconds(works(workload, changed, "rlflow"))[name] for workload, name, _ in pairs])

    base, columns = predicted(free), []
    for constant, rate in zip(constants, rates, strict=True):
        columns.append(predicted({**free, constant: 0.5 if rate else 1.0}) - base)
    for column, rate in zip(columns, rates, strict=True):
        base = base - column if rate else base
    found = _not_negative(np.array(columns).T / seen[:, None], (seen - base) / seen)
    values = {
        constant: 1 / max(value, 1.0) if rate else value
        for constant, value, rate in zip(constants, found, rates, strict=True)
    }
    return replace(machine, **{**free, **values})


def _not_negative(columns: NDArray[np.float64], seen: NDArray[np.float64]) -> list[float]:
    """The factors of one or two columns that come nearest to `seen`, none of them below 0."""
    found = np.linalg.lstsq(columns, seen, rcond=None)[0]
    if (found >= 0).all():
        return [float(value) for value in found]
    alone = [max(float(column @ seen / (column @ column)), 0.0) if column.any() else 0.0 for column in columns.T]
    errors = [float(np.linalg.norm(column * value - seen)) for column, value in zip(columns.T, alone, strict=True)]
    nearest = int(np.argmin(errors))
    return [value if place == nearest else 0.0 for place, value in enumerate(alone)]
