"""The phases of a run around its steps: loading, saving and resuming, with the seconds and memory that they take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlflow.memory.estimate import FLOAT32, RoleBytes
from rlflow.memory.workload import LoadedRole, Workload
from rlflow.simulate.costs import gather_seconds
from rlflow.simulate.hardware import Hardware
from rlflow.storage.space import in_bytes


@dataclass(frozen=True)
class Phase:
    """A phase of a run.

    Attributes:
        name: `loading`, `saving` or `resuming`.
        seconds: For which all ranks are at it.
        nbytes: That the node which moves most moves from or to storage.
        memory: Of the fullest rank, at its fullest moment.
    """

    name: str
    seconds: float
    nbytes: float
    memory: float


def run_phases(workload: Workload, hardware: Hardware, buffer: float) -> list[Phase]:
    """Of a run, its roles one after the other.

    Args:
        workload: Of all ranks.
        hardware: Of a node; processes on it share its storage's bandwidth.
        buffer: Bytes of weights gathered at once.
    """
    own = [role for role in workload.roles.values() if role.owner is None]
    trained = [role for role in own if role.training.trained]
    loading = sum(_loaded_bytes(role, hardware) for role in own)
    states = sum(_state_bytes(role, hardware) for role in trained)
    saved = sum(_saved_bytes(role, hardware) for role in trained)
    gathering = sum(
        gather_seconds(role.size.parameters * role.training.width, role.training.gathered_over, hardware)
        for role in trained
    )
    bandwidth = hardware.storage_bandwidth
    fullest = [_memory(workload, rank, buffer) for rank in _unlike(workload)]
    return [
        Phase("loading", loading / bandwidth, loading, max(loading for loading, _, _ in fullest)),
        Phase("saving", saved / bandwidth + gathering, saved, max(saving for _, saving, _ in fullest)),
        Phase(
            "resuming",
            (loading + states) / bandwidth,
            loading + states,
            max(resuming for _, _, resuming in fullest),
        ),
    ]


def phase_lines(found: Sequence[Phase], capacity: float) -> Iterator[str]:
    """A table; `!` where a rank's memory does not take it."""
    yield f"    {'phase':<10} {'takes':>11} {'memory':>9} {'a node moves':>13}"
    for phase in found:
        mark = " " if phase.memory <= capacity else "!"
        moved = in_bytes(phase.nbytes)
        yield f"  {mark} {phase.name:<10} {phase.seconds:9.1f} s {in_bytes(phase.memory):>9} {moved:>13}"


def _memory(workload: Workload, rank: int, buffer: float) -> tuple[float, float, float]:
    """Loading, saving and resuming of a rank: what is loaded stays, and each role in its turn takes more."""
    longest = workload.lengths.longest_prompt + workload.lengths.longest_response
    lies = loading = rests = saving = resuming = 0.0
    for role in workload.roles.values():
        if role.owner is not None or rank not in role.layout.ranks:
            continue
        of_role = RoleBytes(role.size, role.training, longest, buffer)
        loading = max(loading, lies + of_role.loading)
        lies += of_role.loading - (of_role.piece if role.training.stage == 3 else 0)
        saving = max(saving, of_role.sync - of_role.resting)
        resuming = max(resuming, of_role.resuming - of_role.resting)
        rests += of_role.resting
    return loading, rests + saving, rests + resuming


def _unlike(workload: Workload) -> list[int]:
    """A rank for each set of roles that live together."""
    alike: dict[tuple[bool, ...], int] = {}
    for rank in range(workload.ranks):
        alike.setdefault(tuple(rank in role.layout.ranks for role in workload.roles.values()), rank)
    return list(alike.values())


def _nodes(role: LoadedRole, hardware: Hardware) -> int:
    return math.ceil(len(role.layout.ranks) / hardware.gpus_per_node)


def _loaded_bytes(role: LoadedRole, hardware: Hardware) -> float:
    """That a node reads of a model's files: all, once for its ranks, or the parts of its ranks."""
    here = min(len(role.layout.ranks), hardware.gpus_per_node)
    whole = role.size.parameters * role.training.width
    return whole * min(1.0, here / role.training.weights_over)


def _state_bytes(role: LoadedRole, hardware: Hardware) -> float:
    """That a node reads of a checkpoint: float32 weights and moments, all or its ranks' parts."""
    how, here = role.training, min(len(role.layout.ranks), hardware.gpus_per_node)
    numbers = how.trained * (1 + how.moments // 2 * 2)
    return numbers * FLOAT32 * min(1.0, here / how.states_over)


def _saved_bytes(role: LoadedRole, hardware: Hardware) -> float:
    """That a node writes, all at once and equally much: the checkpoint, and the model in Hugging Face form."""
    how = role.training
    numbers = how.trained * (1 + how.moments // 2 * 2)
    return (numbers * FLOAT32 + role.size.parameters * how.width) / _nodes(role, hardware)
