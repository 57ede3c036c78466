from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlflow.errors import UserError
from rlflow.models.handle import ForwardPlan
from rlflow.models.scalar import RewardModel
from rlflow.values.batch import Batch
from tests.models.conftest import scalars_one_by_one

CPU = torch.device("cpu")


@pytest.mark.parametrize("packing", [True, False])
def test_a_row_is_scored_at_its_last_token(classifier: Path, rows: Batch, packing: bool) -> None:
    # Row 1 has no response. Row 2 ends with the token that the model's configuration takes for padding.
    rows.response_ids[2, rows.lengths[2] - 1] = 33
    model = RewardModel(str(classifier), trainable=False)
    model.attach(model.load(classifier, torch.float64, CPU), ForwardPlan(40, packing))
    with torch.no_grad():
        reference = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float64)
        _, expected = scalars_one_by_one(reference, rows)
    torch.testing.assert_close(model.scores(rows), expected, rtol=0, atol=1e-12)
    assert float(expected.std()) > 1


def test_a_frozen_reward_model_without_an_output_layer_is_refused(tiny: Path) -> None:
    with pytest.raises(UserError, match="has no output layer `score` to score with") as refusal:
        RewardModel(str(tiny), trainable=False).load(tiny, torch.float32, CPU)
    assert "\n" not in str(refusal.value)
