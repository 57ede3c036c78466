"""The result of a replayed node is compared with the result in the run."""

from __future__ import annotations

import math

import pytest
import torch

from rlflow.controller.inputs import difference
from rlflow.values.column_kinds import PerSample
from rlflow.values.columns import Parts

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("here", "there", "apart"),
    [
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([INF, 1.0], [INF, 1.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.5),
        ([NAN, 1.0], [2.0, 1.0], INF),
        ([1.0, 2.0], [NAN, 2.5], INF),
    ],
)
def test_nan_on_one_side_alone_is_a_difference(here: list[float], there: list[float], apart: float) -> None:
    one, other = torch.tensor(here), torch.tensor(there)
    assert difference(one, other, PerSample, torch.tensor([1, 1])) == apart


def test_parts_of_other_names_differ_whichever_side_has_more() -> None:
    score = torch.tensor([1.0])
    one, more = Parts(right=score), Parts(right=score, short=score)
    for here, there in ((one, more), (more, one), (one, Parts(wrong=score))):
        assert difference(here, there, dict[str, PerSample], torch.tensor([1])) == INF
    assert difference(one, Parts(right=score), dict[str, PerSample], torch.tensor([1])) == 0.0
