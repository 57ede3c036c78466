"""Loss and gradient of DPO equal those of TRL's `DPOTrainer`, for the same weights and tokens.

Its `loss_type` `sigmoid`, the default, with its `beta`; both add logprobs up over the response and average over pairs.
"""

from __future__ import annotations

import pytest

from rlflow import CausalLM
from rlflow.algorithms import DPO
from tests.against_trl import rlflow_nodes
from tests.against_trl.cases import TOLERANCE, Models, Result, gradient_distance
from tests.against_trl.conftest import TheirResult

pytestmark = pytest.mark.slow
BETA = 0.3


@pytest.fixture(scope="module")
def dpo(models: Models, trl: TheirResult) -> tuple[Result, Result]:
    """Ours, and theirs."""
    pairs = rlflow_nodes.recorded_pairs()
    start = {"actor": models.policy, "reference": models.reference}
    mine = rlflow_nodes.step(DPO(CausalLM(str(models.policy)), beta=BETA), {"batch": pairs}, start, models.policy)
    return mine, trl("dpo", models, BETA)


def test_the_loss_is_equal(dpo: tuple[Result, Result]) -> None:
    mine, theirs = dpo
    assert mine.loss == pytest.approx(theirs.loss, rel=TOLERANCE)


def test_the_gradient_is_equal(dpo: tuple[Result, Result]) -> None:
    assert gradient_distance(*dpo) < TOLERANCE
