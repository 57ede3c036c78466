"""Loading, saving and resuming: numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rlflow.memory.workload import Lengths, LoadedRole, RoleTraining
from rlflow.models.sizes import ModelSize
from rlflow.simulate.hardware import PRESETS
from rlflow.simulate.simulation import Phase, phase_lines, run_phases
from rlflow.values.layout import Layout

# 3,850 parameters; the largest piece is an embedding of 1,000
SMALL = ModelSize(hidden=10, intermediate=20, layers=2, heads=2, kv_heads=1, vocabulary=100)
ZERO3 = RoleTraining(3, 8, 2, 3850, 3, False, 1, 5, bucket=100, live=1000)
NODES = replace(PRESETS["h100"], gpus_per_node=4, storage_bandwidth=1000.0, node_latency=0.0, network_latency=0.0)


def role(how: RoleTraining, ranks: range) -> LoadedRole:
    return LoadedRole(SMALL, how, 1, None, Layout(tuple(ranks), len(ranks)))


def found(roles: dict[str, LoadedRole], hardware: Any = NODES) -> dict[str, Phase]:
    """Of eight ranks on two nodes that move 1,000 bytes a second each."""
    load: Any = SimpleNamespace(roles=roles, ranks=8, lengths=Lengths(2, 2, 2, 3))
    return {phase.name: phase for phase in run_phases(load, hardware, buffer=0)}


def test_where_weights_are_divided_a_node_reads_the_parts_of_its_ranks() -> None:
    assert found({"actor": role(ZERO3, range(8))})["loading"].seconds == pytest.approx(3850 * 2 / 2 / 1000)


def test_where_they_are_not_a_node_reads_them_all_once() -> None:
    assert found({"actor": role(replace(ZERO3, stage=2), range(8))})["loading"].seconds == pytest.approx(7.7)


def test_all_nodes_of_a_role_write_at_once() -> None:
    # float32 weights, two moments, and the model in 2 bytes
    both = found({"actor": role(ZERO3, range(8))})["saving"]
    one = found({"actor": role(replace(ZERO3, ranks=4), range(4))})["saving"]
    assert (both.nbytes, one.nbytes) == (3850 * 14 / 2, 3850 * 14)
    assert one.seconds == pytest.approx(53.9, rel=1e-3)


def test_resuming_reads_the_model_and_the_parts_of_the_checkpoint() -> None:
    divided, whole = (found({"actor": role(replace(ZERO3, stage=stage), range(8))})["resuming"] for stage in (3, 0))
    assert (divided.nbytes, whole.nbytes) == (3850 * 14 / 2, 3850 * 14)


def test_roles_are_loaded_one_after_the_other() -> None:
    frozen = RoleTraining(3, 8, 2, 0, 0, False, 1, 5, live=1000)
    part = 3850 / 8
    loading = found({"actor": role(ZERO3, range(8)), "reference": role(frozen, range(8))})["loading"]
    assert loading.memory == pytest.approx(part * (2 + 4 + 4) + part * 2 + 1000 * 2)


def test_the_fullest_rank_is_told_of() -> None:
    frozen = RoleTraining(0, 4, 2, 0, 0, False, 1, 5)
    apart = found({"actor": role(replace(ZERO3, ranks=4), range(4)), "reference": role(frozen, range(4, 8))})
    assert apart["loading"].memory == pytest.approx(3850 / 4 * 10 + 1000 * 2)


def test_a_phase_that_does_not_fit_is_marked() -> None:
    lines = list(phase_lines([Phase("loading", 1.5, 2e9, 3e9), Phase("saving", 2.0, 2e9, 5e9)], capacity=4e9))
    assert lines[1].split() == ["loading", "1.5", "s", "3.0", "GB", "2.0", "GB"]
    assert lines[2].split() == ["!", "saving", "2.0", "s", "5.0", "GB", "2.0", "GB"]
