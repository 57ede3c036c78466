from __future__ import annotations

import pytest

from rlflow.errors import UserError
from rlflow.models.handle import ForwardPlan
from rlflow.models.value_model import ValueModel


def test_a_token_budget_below_one_is_refused() -> None:
    with pytest.raises(UserError, match="`token_budget` is 0"):
        ForwardPlan(token_budget=0)


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
