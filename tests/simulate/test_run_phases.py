"""Loading, saving and resuming: numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rlflow.memory.estimate import memories
from rlflow.memory.role_bytes import LoadedRole
from rlflow.models.sizes import ModelSize
from rlflow.simulate.hardware import PRESETS
from rlflow.simulate.simulation import Phase, phase_lines, run_phases
from rlflow.values.layout import Layout

# 3,850 parameters; the largest piece is an embedding of 1,000
SMALL = ModelSize(hidden=10, intermediate=20, layers=2, heads=2, kv_heads=1, vocabulary=100)
PARTS = {"reduce_bucket_size": 100, "max_live_parameters": 1000}
ZERO3 = LoadedRole(SMALL, Layout(tuple(range(8)), 8), 3, 8, 2, 3850, 3, False, 1, 5, **PARTS)
HALF = replace(ZERO3, layout=Layout(tuple(range(4)), 4), divided_over=4)
NODES = replace(PRESETS["h100"], gpus_per_node=4, storage_bandwidth=1000.0, node_latency=0.0, network_latency=0.0)


def found(roles: dict[str, LoadedRole], hardware: Any = NODES) -> dict[str, Phase]:
    """The phases of eight ranks on two nodes that move 1,000 bytes a second each, without values and engines."""
    plan = SimpleNamespace(layouts=dict, every=list, max_staleness=0, dynamic_sampling=None)
    load: Any = SimpleNamespace(roles=roles, engines={}, ranks=8, graph=SimpleNamespace(order=[]), plan=plan)
    phases = run_phases(load, memories(load, 80e9), hardware, sync_bucket_bytes=0)
    return {phase.name: phase for phase in phases}


def test_where_weights_are_divided_a_node_reads_the_parts_of_its_ranks() -> None:
    assert found({"actor": ZERO3})["loading"].seconds == pytest.approx(3850 * 2 / 2 / 1000)


def test_where_weights_are_not_divided_a_node_reads_them_all_once() -> None:
    assert found({"actor": replace(ZERO3, stage=2)})["loading"].seconds == pytest.approx(7.7)


def test_all_nodes_of_a_role_write_concurrently() -> None:
    # float32 weights, two moments, and the model in 2 bytes
    both = found({"actor": ZERO3})["saving"]
    one = found({"actor": HALF})["saving"]
    assert (both.nbytes, one.nbytes) == (3850 * 14 / 2, 3850 * 14)
    assert one.seconds == pytest.approx(53.9, rel=1e-3)


def test_adapters_are_written_alone_and_averages_into_the_checkpoint() -> None:
    # float32 weights, two moments, and adapters in 2 bytes
    assert found({"actor": replace(ZERO3, trained=100, adapters=True)})["saving"].nbytes == 100 * 14 / 2
    average = replace(ZERO3, trained=0, moments=0, averaged=3850)
    assert found({"average": average})["saving"].nbytes == 3850 * 4 / 2


def test_resuming_reads_the_model_and_the_parts_of_the_checkpoint() -> None:
    divided, whole = (found({"actor": replace(ZERO3, stage=stage)})["resuming"] for stage in (3, 0))
    assert (divided.nbytes, whole.nbytes) == (3850 * 14 / 2, 3850 * 14)


def test_roles_are_loaded_one_after_the_other() -> None:
    frozen = replace(ZERO3, trained=0, moments=0, reduce_bucket_size=0)
    part = 3850 / 8
    loading = found({"actor": ZERO3, "reference": frozen})["loading"]
    assert loading.memory == pytest.approx(part * (2 + 4 + 4) + part * 2 + 1000 * 2)


def test_the_memory_of_a_phase_is_that_of_the_fullest_rank() -> None:
    frozen = LoadedRole(SMALL, Layout(tuple(range(4, 8)), 4), 0, 4, 2, 0, 0, False, 1, 5)
    apart = found({"actor": HALF, "reference": frozen})
    assert apart["loading"].memory == pytest.approx(3850 / 4 * 10 + 1000 * 2)


def test_a_phase_that_does_not_fit_is_marked() -> None:
    lines = list(phase_lines([Phase("loading", 1.5, 2e9, 3e9), Phase("saving", 2.0, 2e9, 5e9)], capacity=4e9))
    assert lines[1].split() == ["loading", "1.5", "s", "3.0", "GB", "2.0", "GB"]
    assert lines[2].split() == ["!", "saving", "2.0", "s", "5.0", "GB", "2.0", "GB"]
