"""Loss and gradient of KTO equal those of TRL's `KTOTrainer`, for the same weights and tokens.

Its `loss_type` `kto`, the default, with its `beta` and weights. For z, TRL pairs each prompt with the response of the
row before, and rlflow with that of the next row; TRL is given the responses of the next rows here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlflow import CausalLM
from rlflow.algorithms import KTO
from rlflow.values.path import RowPath
from tests.against_trl import rlflow_nodes
from tests.against_trl.cases import LABELS, TOLERANCE, Models, Result, gradient_distance
from tests.against_trl.conftest import TheirResult

pytestmark = pytest.mark.slow
BETA, WEIGHTS = 0.3, (1.5, 0.8)


@pytest.fixture(scope="module", params=["z above 0", "z at least 0"])
def kto(request: pytest.FixtureRequest, models: Models, trl: TheirResult) -> tuple[Result, Result]:
    """Ours, and theirs."""
    policy, reference = models.policy, models.reference
    if request.param == "z at least 0":  # then the mean ratio is below
        policy, reference = reference, policy
    path = RowPath(torch.arange(len(LABELS))[:, None], ("batch",))
    batch = replace(rlflow_nodes.recorded_batch(), rows=[{"label": label} for label in LABELS], path=path)
    start = {"actor": policy, "reference": reference}
    module = KTO(CausalLM(str(policy)), beta=BETA, desirable_weight=WEIGHTS[0], undesirable_weight=WEIGHTS[1])
    return rlflow_nodes.step(module, {"batch": batch}, start, policy), trl("kto", policy, reference, BETA, WEIGHTS)


def test_the_loss_is_equal(kto: tuple[Result, Result]) -> None:
    mine, theirs = kto
    assert mine.loss == pytest.approx(theirs.loss, rel=TOLERANCE)


def test_the_gradient_is_equal(kto: tuple[Result, Result]) -> None:
    assert gradient_distance(*kto) < TOLERANCE
