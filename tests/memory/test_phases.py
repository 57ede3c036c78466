"""Bytes of a role in each phase of a run: by hand, and as they were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlflow.memory.estimate import Memory
from rlflow.memory.role_bytes import LoadedRole
from rlflow.memory.workload import Engine
from rlflow.models.sizes import ModelSize
from rlflow.rollout.engine import EngineMemory
from rlflow.values.layout import Layout

# 3,850 parameters; the largest piece is an embedding of 1,000
SMALL = ModelSize(hidden=10, intermediate=20, layers=2, heads=2, kv_heads=1, vocabulary=100)
# bf16 on two ranks, with a float32 copy and two moments; 5 tokens at most
TWO = Layout((0, 1), 2)
WHOLE = LoadedRole(SMALL, TWO, 0, 2, 2, 3850, 3, False, 1, 5)
ACTIVATIONS = 5 * (2 * 380 + 100)  # of two layers, and a backward pass's; see `test_estimate.py`
LOGITS = 2 * 4 * 5 * 100 + 1000 * (4 + 2)  # with their gradient, and that of the output layer

# RssAnon of a rank beyond what it was before the model was built, MiB, the larger of two ranks on the CPU, 2026-11-22:
# SFT with AdamW on 47.2 million parameters, micro-batches of 64 tokens, buckets of 11.8 million numbers, and glibc's
# malloc giving back what is freed. The model was still read whole, so loading is compared at ZeRO-0 and 2 alone.
MEASURED_SIZE = ModelSize(1024, 2816, 4, 4, 2, 100, tied=True, bias=True)
BUCKET = 11_800_000
ALL = MEASURED_SIZE.parameters
ZERO_2 = {"reduce_bucket_size": BUCKET}
ZERO_3 = {**ZERO_2, "max_live_parameters": ALL}
MEASURED = {
    "ZeRO-0, fp32": (LoadedRole(MEASURED_SIZE, TWO, 0, 2, 4, ALL, 2, False, 1, 64), 929, 188),
    "ZeRO-2, fp32": (LoadedRole(MEASURED_SIZE, TWO, 2, 2, 4, ALL, 3, False, 1, 64, **ZERO_2), 750, 362),
    "ZeRO-3, fp32": (LoadedRole(MEASURED_SIZE, TWO, 3, 2, 4, ALL, 3, False, 1, 64, **ZERO_3), 743, None),
    "FSDP2, fp32": (LoadedRole(MEASURED_SIZE, TWO, 3, 2, 4, ALL, 2, False, 1, 64, masters=True), 553, None),
    "ZeRO-2, bf16": (LoadedRole(MEASURED_SIZE, TWO, 2, 2, 2, ALL, 3, False, 1, 64, **ZERO_2), 581, 276),
    "ZeRO-3, bf16": (LoadedRole(MEASURED_SIZE, TWO, 3, 2, 2, ALL, 3, False, 1, 64, **ZERO_3), 625, None),
    "FSDP2, bf16": (LoadedRole(MEASURED_SIZE, TWO, 3, 2, 2, ALL, 2, False, 1, 64, masters=True), 504, None),
}


def step(role: LoadedRole) -> float:
    """The step of a rank that trains this role and nothing else."""
    return Memory((0,), {"actor": role}, {}, held=0, capacity=0).training


def test_what_is_not_divided_is_loaded_whole_with_its_float32_copy() -> None:
    assert WHOLE.loading == 3850 * (2 + 4)


def test_at_zero_2_the_weights_are_there_twice_while_they_are_flattened() -> None:
    # 3,850 x 2 flat, and while the part is cut out and copied twice 1,925 x 4; or 3,850 x 2 twice
    how = replace(WHOLE, stage=2, reduce_bucket_size=100)
    assert how.loading == 3850 * 2 + 2 * 1925 * 4
    assert replace(how, width=4, moments=2).loading == 2 * 3850 * 4
    assert replace(how, trained=100).loading == 3850 * 2 + 2 * 50 * 4  # only what is trained is flattened


def test_of_roles_that_are_loaded_only_the_last_ones_copies_are_counted() -> None:
    how = replace(WHOLE, stage=2, reduce_bucket_size=100)
    memory = Memory((0,), {"actor": how, "critic": how}, {}, held=0, capacity=0)
    assert memory.loading == 3850 * 2 + 1925 * 4 + how.loading


def test_between_steps_gradients_of_zero_3_and_sleeping_engines_take_memory() -> None:
    how = replace(WHOLE, stage=3, reduce_bucket_size=100, max_live_parameters=1500)
    engine = Engine(1, (0,), 700, EngineMemory(1, cache=50, asleep="weights"))
    memory = Memory((0,), {"actor": how}, {"actor": engine}, held=0, capacity=1e6)
    assert how.resting == 1925 * (2 + 12 + 4) + 100 * 4
    assert memory.generating == how.resting + 750
    assert memory.saving(buffer=3000) == how.resting + 3000 + 700
    assert memory.resuming == how.resuming + 700


def test_at_zero_3_a_rank_loads_its_part_and_a_piece() -> None:
    # a part of the weights, of the float32 copy and of the gradients, for which there is room from the beginning
    how = replace(WHOLE, stage=3, reduce_bucket_size=100, max_live_parameters=1500)
    assert how.loading == 1925 * (2 + 4 + 4) + 1000 * 2


def test_with_fsdp_a_rank_loads_its_float32_part_and_a_piece() -> None:
    how = replace(WHOLE, stage=3, moments=2, masters=True)
    assert how.loading == 1925 * 4 + 1000 * 2


def test_a_step_of_zero_3_adds_what_is_gathered_and_logits_or_what_is_reduced() -> None:
    how = replace(WHOLE, stage=3, reduce_bucket_size=100, max_live_parameters=1500)
    parts = 1925 * (2 + 4 + 8 + 4) + 100 * 4  # with gradients and the bucket
    assert step(how) == parts + ACTIVATIONS + LOGITS + 1500 * 2
    assert step(replace(how, reduce_bucket_size=6000)) == parts + 5900 * 4 + ACTIVATIONS + 6000 * 2 + 1500 * 2


def test_a_step_of_fsdp_adds_two_pieces_and_the_gradients_of_one() -> None:
    how = replace(WHOLE, stage=3, moments=2, masters=True)
    assert step(how) == 1925 * (4 + 8 + 4) + ACTIVATIONS + LOGITS + 1000 * 2 * 2  # reduced are 1,000 of 2 + 4 bytes


def test_where_passes_are_small_the_optimizer_decides() -> None:
    how = replace(WHOLE, stage=2, reduce_bucket_size=1, token_budget=1)
    root = 1925 * 4
    assert step(how) == 3850 * 2 + 1925 * (12 + 4) + root
    assert how.resuming == step(how)  # by an update the optimizer makes its states


def test_weights_are_brought_and_saved_in_buffers() -> None:
    how = replace(WHOLE, stage=3, moments=2, masters=True)
    assert how.sync(buffer=3000) == 1925 * 12 + 3000
    assert WHOLE.sync(buffer=1e9) == 3850 * (2 + 12) + 3850 * 2  # all of them at most


def test_a_frozen_role_is_its_weights_and_what_passes_gather() -> None:
    how = replace(WHOLE, stage=3, trained=0, moments=0, masters=True)
    assert (how.loading, how.resuming) == (1925 * 2 + 2000, 1925 * 2 + 2000)
    assert step(how) == 1925 * 2 + 2 * 4 * 5 * 100 + 2 * 1000 * 2  # logits, whose activations are not there for long


@pytest.mark.parametrize("name", MEASURED)
def test_phases_are_as_large_as_they_were_measured(name: str) -> None:
    role, measured, loading = MEASURED[name]
    assert step(role) / 2**20 == pytest.approx(measured, rel=0.15)
    if loading is not None:
        assert role.loading / 2**20 == pytest.approx(loading, rel=0.15)


# MiB of set-up, a step and a weight sync, by `benchmarks/large_models.py`; see docs/maintainers/benchmarks.md.
DEEP = ModelSize(512, 1408, 36, 8, 8, 128, tied=True, bias=True)
LAYER, DEEP_ALL = 3_211_264, DEEP.parameters
LAYERS = {"reduce_bucket_size": LAYER, "max_live_parameters": LAYER}
OF_BENCHMARK = {
    "ZeRO-0": (LoadedRole(DEEP, TWO, 0, 2, 4, DEEP_ALL, 2, False, 1, 128), (451, 2257, 1367)),
    "ZeRO-3": (LoadedRole(DEEP, TWO, 3, 2, 4, DEEP_ALL, 3, False, 1, 128, **LAYERS), (709, 1391, 1199)),
    "FSDP2": (LoadedRole(DEEP, TWO, 3, 2, 4, DEEP_ALL, 2, False, 1, 128, masters=True), (270, 975, 734)),
}


@pytest.mark.parametrize("name", OF_BENCHMARK)
def test_phases_are_as_large_as_the_benchmark_of_large_models_found(name: str) -> None:
    role, measured = OF_BENCHMARK[name]
    found = [role.loading / 2**20, step(role) / 2**20, role.sync(buffer=4 * LAYER) / 2**20]
    assert found == pytest.approx(measured, rel=0.16)
