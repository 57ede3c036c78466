"""Loss and gradient of a reward model equal those of TRL's `RewardTrainer`, for the same weights and tokens.

Both score the last token of each response. TRL can add a margin to the pairs and draw the scores to 0; neither is here.
"""

from __future__ import annotations

import pytest

from rlflow import RewardModel
from rlflow.algorithms import RewardModelTraining
from tests.against_trl import rlflow_nodes
from tests.against_trl.cases import TOLERANCE, Models, Result, gradient_distance, write_reward_model
from tests.against_trl.conftest import TheirResult

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def training(models: Models, trl: TheirResult, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Result]:
    """Ours, and theirs."""
    folder = write_reward_model(models.policy, tmp_path_factory.mktemp("models") / "reward_model")
    module = RewardModelTraining(RewardModel(str(folder)))
    mine = rlflow_nodes.step(module, {"batch": rlflow_nodes.recorded_pairs()}, {"reward_model": folder}, folder)
    return mine, trl("reward_model", folder)


def test_the_loss_is_equal(training: tuple[Result, Result]) -> None:
    mine, theirs = training
    assert mine.loss == pytest.approx(theirs.loss, rel=TOLERANCE)


def test_the_gradient_is_equal(training: tuple[Result, Result]) -> None:
    assert gradient_distance(*training) < TOLERANCE
