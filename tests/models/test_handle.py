from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.errors import UserError
from rlflow.models.handle import ForwardPlan
from rlflow.models.scalar import ValueModel
from rlflow.models.tiny import write_tiny_model
from rlflow.values.batch import Pairs
from rlflow.values.ragged import Ragged


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "`epochs` is 0"),
        ({"samples_per_update": 0}, "`samples_per_update` is 0"),
        ({"start_step": -1}, "`start_step` is -1"),
        ({"vision_tower_lr": -1.0}, "`vision_tower_lr` is -1.0; give a number from 0 to 1000"),
        ({"vision_tower_lr": 1.0, "freeze_vision_tower": True}, "`vision_tower_lr` is set, and `freeze_vision_tower`"),
        ({"vision_tower_lr": 1.0, "trainable": False}, "`vision_tower_lr` is set for 'tiny', which is frozen"),
    ],
)
def test_settings_of_every_kind_of_model_are_refused_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ValueModel("tiny", **settings)


def test_a_learning_rate_of_a_tower_is_refused_for_a_model_without_one(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    with pytest.raises(UserError, match=r"^`vision_tower_lr` is set for 'tiny', which has no tower; leave it out"):
        ValueModel("tiny", vision_tower_lr=1e-3).load(folder, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("packing", "alone"),
    [
        (True, [[0, 2], [1]]),
        (False, [[0], [1], [2]]),
    ],
)
def test_pairs_are_split_by_what_both_responses_take(packing: bool, alone: list[list[int]]) -> None:
    ids = [Ragged.from_lists([[1] * length for length in lengths]) for lengths in ((2, 2, 2), (9, 6, 5), (1, 6, 2))]
    pairs = Pairs(*ids, rows=[{}, {}, {}])
    # Tokens read of a row are prompt + response - 1: 10 + 2, 7 + 7, 6 + 3. Padded, twice the longer: 20, 14, 12.
    split = ForwardPlan(token_budget=24, packing=packing, share_prefixes=False).split(pairs)
    assert sorted(rows.tolist() for rows in split) == alone
