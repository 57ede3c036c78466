"""Loss and gradient of SFT equal those of TRL's `SFTTrainer`, for the same weights and tokens.

Its `loss_type` `nll`, the default, is the mean over the tokens of the batch, as `token-mean` is; labels of -100 on the
prompt are what `loss_mask` says here.
"""

from __future__ import annotations

import pytest

from rlflow import CausalLM
from rlflow.algorithms import SFT
from tests.against_trl import rlflow_nodes
from tests.against_trl.cases import TOLERANCE, Models, Result, gradient_distance
from tests.against_trl.conftest import TheirResult

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sft(models: Models, trl: TheirResult) -> tuple[Result, Result]:
    """Ours, and theirs."""
    batch = {"batch": rlflow_nodes.recorded_batch()}
    mine = rlflow_nodes.step(SFT(CausalLM(str(models.policy))), batch, {"actor": models.policy}, models.policy)
    return mine, trl("sft", models)


def test_the_loss_is_equal(sft: tuple[Result, Result]) -> None:
    mine, theirs = sft
    assert mine.loss == pytest.approx(theirs.loss, rel=TOLERANCE)


def test_the_gradient_is_equal(sft: tuple[Result, Result]) -> None:
    assert gradient_distance(*sft) < TOLERANCE
