from __future__ import annotations

import pytest

from rlflow.errors import UserError
from rlflow.models.handle import ForwardPlan
from rlflow.models.scalar import ValueModel
from rlflow.values.batch import Pairs
from rlflow.values.ragged import Ragged


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "`epochs` is 0"),
        ({"samples_per_update": 0}, "`samples_per_update` is 0"),
        ({"start_step": -1}, "`start_step` is -1"),
    ],
)
def test_settings_of_every_kind_of_model_are_refused_out_of_range(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ValueModel("tiny", **settings)  # type: ignore[arg-type]


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
