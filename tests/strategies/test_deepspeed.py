"""Features of DeepSpeed: reductions that overlap the backward pass, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.errors import UserError
from rlflow.strategies.deepspeed import DeepSpeedStrategy
from tests.ranks import RankPool
from tests.strategies.reference import distance, plain_update
from tests.strategies.strategy_update import Stage, overlapping_update
from tests.strategies.test_data_parallel import CLIP, SGD, Reference, sgd


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Reference:
    return plain_update(tiny, sgd, CLIP, updates=1)


@pytest.mark.parametrize("overlap_comm", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradient_and_norm_match_the_reference_with_and_without_overlap(
    stage: Stage, overlap_comm: bool, tiny: Path, ranks2: RankPool, reference: Reference
) -> None:
    for overlaps, outcome in ranks2.run(overlapping_update, tiny, stage, overlap_comm, SGD):
        assert overlaps == overlap_comm
        assert distance(outcome.gradients[0], reference[0][0]) < 1e-5
        assert outcome.norms == [pytest.approx(reference[1][0], rel=1e-5)]


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"stage": 4}, "`stage` is 4"),
        ({"precision": "fp64"}, "`precision` is 'fp64'"),
        ({"token_budget": 0}, "`token_budget` is 0"),
        ({"timeout_s": 0.0}, "`timeout_s` is 0.0"),
        ({"stage": 0, "offload_optimizer": True}, "`stage` is 0"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(settings: dict[str, object], found: str) -> None:
    with pytest.raises(UserError, match=found):
        DeepSpeedStrategy(**settings)
