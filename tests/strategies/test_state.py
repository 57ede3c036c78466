"""The state of training leaves every strategy in parts, and comes back in parts of another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlflow.models.tiny import write_tiny_model
from tests.ranks import RankPool
from tests.strategies.state import State, parts_after, parts_when_given, put_together
from tests.strategies.update import Stage


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices ZeRO-3 divides."""
    return write_tiny_model(tmp_path_factory.mktemp("state") / "tiny", hidden_size=128, layers=1)


@pytest.fixture(scope="module")
def state(model: Path) -> State:
    """Of one process without DeepSpeed, after two updates."""
    return put_together([parts_after(model, None, "fp32", 2)])


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


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (1, "fp32"), (3, "bf16"), ("fsdp", "bf16")])
def test_two_ranks_hold_each_element_of_a_state_once_and_compute_with_it(
    stage: Stage, precision: str, model: Path, state: State, ranks2: RankPool
) -> None:
    holds_the_state(model, state, stage, precision, ranks2)


@pytest.mark.exact
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3, "fsdp"])
def test_at_every_stage_three_ranks_hold_each_element_of_a_state_once(
    stage: Stage, precision: str, model: Path, state: State, ranks3: RankPool
) -> None:
    holds_the_state(model, state, stage, precision, ranks3)


def test_the_parts_of_ranks_are_as_long_as_one_another(model: Path, state: State, ranks2: RankPool) -> None:
    first, second = ranks2.run(parts_after, model, 0, "fp32", 1)
    for (key, shape, kind, start, values), (_, _, _, after, rest) in zip(first, second, strict=True):
        half = shape.numel() // 2
        assert (start, len(values), after, len(rest)) == (0, half, half, shape.numel() - half), (key, kind)
