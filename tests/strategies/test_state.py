"""The state of training leaves every strategy in parts, and comes back in parts of another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlflow.models.tiny import write_tiny_model
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.reference import distance
from tests.strategies.state import (
    State,
    elements_read,
    parts_after,
    parts_when_given,
    put_together,
    restored_parts,
    weights_divided_twice,
    written_parts,
)
from tests.strategies.strategy_update import Stage


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices ZeRO-3 divides."""
    return write_tiny_model(tmp_path_factory.mktemp("state") / "tiny", hidden_size=128, layers=1)


@pytest.fixture(scope="module")
def state(model: Path) -> State:
    """The state of one process without DeepSpeed, after two updates."""
    return put_together([parts_after(model, updates=2)])


def same(found: State, expected: State) -> bool:
    return all(torch.equal(found[key][kind], of) for key, kinds in expected.items() for kind, of in kinds.items())


def holds_the_state(model: Path, state: State, stage: Stage, precision: str, ranks: RankPool) -> None:
    outcomes = ranks.run(parts_when_given, model, stage, precision, state)
    found = put_together([parts for parts, _, _ in outcomes])
    assert found.keys() == state.keys()
    assert {kind for kinds in found.values() for kind in kinds} == {"weight", "exp_avg", "exp_avg_sq"}
    assert same(found, state)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    for _, weights, norm in outcomes:
        assert all(torch.equal(weights[key], kinds["weight"].to(dtype)) for key, kinds in state.items())
        assert torch.isfinite(norm)
        assert torch.equal(norm, outcomes[0][2])


@pytest.mark.parametrize(
    ("stage", "precision"),
    slow_but([(0, "bf16"), (1, "fp32"), (3, "bf16")], [(0, "bf16"), (1, "fp32"), (3, "bf16"), ("fsdp", "bf16")]),
)
def test_two_ranks_hold_each_element_of_a_state_once_and_compute_with_it(
    stage: Stage, precision: str, model: Path, state: State, ranks2: RankPool
) -> None:
    holds_the_state(model, state, stage, precision, ranks2)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3, "fsdp"])
def test_at_every_stage_three_ranks_hold_each_element_of_a_state_once(
    stage: Stage, precision: str, model: Path, state: State, ranks3: RankPool
) -> None:
    holds_the_state(model, state, stage, precision, ranks3)


def test_ranks_that_hold_copies_give_half_of_them_each(model: Path, tmp_path: Path, ranks2: RankPool) -> None:
    first, second = ranks2.run(written_parts, model, 0, "fp32", tmp_path)
    for (key, shape, kind, start, values), (_, _, _, after, rest) in zip(first, second, strict=True):
        half = shape.numel() // 2
        assert (start, len(values), after, len(rest)) == (0, half, half, shape.numel() - half), (key, kind)


def test_a_rank_reads_only_what_it_holds(model: Path, state: State, ranks2: RankPool) -> None:
    every = sum(of.numel() for kinds in state.values() for of in kinds.values())
    assert sum(ranks2.run(elements_read, model, 3, "bf16", state)) == every
    assert sum(ranks2.run(elements_read, model, 1, "fp32", state)) == every
    assert ranks2.run(elements_read, model, 0, "fp32", state) == [every, every]


def test_weights_that_ranks_of_a_node_divide_once_more_are_those_that_were_given(
    model: Path, state: State, ranks4: RankPool
) -> None:
    for twice, once in ranks4.run(weights_divided_twice, model, state):
        assert distance(twice, once) < 1e-6


def goes_from_three_ranks(
    before: Stage, after: Stage, precision: str, model: Path, tmp_path: Path, three: RankPool, others: RankPool
) -> None:
    expected = put_together(three.run(written_parts, model, before, precision, tmp_path))
    assert {of["weight"].numel() % 3 for of in expected.values()} == {0, 1, 2}
    assert same(put_together(others.run(restored_parts, model, after, precision, tmp_path)), expected)


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    slow_but(
        [(3, 2, "ranks2"), ("fsdp", 3, "ranks4")],
        [(3, 0, "ranks1"), (3, 2, "ranks2"), (3, 3, "ranks4"), (3, "fsdp", "ranks2"), ("fsdp", 3, "ranks4")],
    ),
)
def test_a_three_rank_checkpoint_restores_on_1_2_or_4_ranks_and_across_strategies(
    before: Stage,
    after: Stage,
    ranks: str,
    model: Path,
    tmp_path: Path,
    ranks3: RankPool,
    request: pytest.FixtureRequest,
) -> None:
    goes_from_three_ranks(before, after, "bf16", model, tmp_path, ranks3, request.getfixturevalue(ranks))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["ranks1", "ranks2", "ranks4"])
@pytest.mark.parametrize("after", [0, 1, 2, 3, "fsdp"])
@pytest.mark.parametrize("before", [0, 1, 2, 3, "fsdp"])
def test_a_checkpoint_of_every_stage_is_restored_at_every_other_and_number_of_ranks(
    before: Stage,
    after: Stage,
    ranks: str,
    model: Path,
    tmp_path: Path,
    ranks3: RankPool,
    request: pytest.FixtureRequest,
) -> None:
    goes_from_three_ranks(before, after, "fp32", model, tmp_path, ranks3, request.getfixturevalue(ranks))
