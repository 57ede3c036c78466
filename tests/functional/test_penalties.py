from __future__ import annotations

from typing import Any

import pytest
import torch

from rlflow.errors import UserError
from rlflow.functional import overlong_penalty


def test_the_penalty_is_that_of_dapo(known: dict[str, Any]) -> None:
    answer = known["overlong_penalty"]
    lengths = torch.tensor([int(length) for length in answer["cases"]])
    penalties = overlong_penalty(lengths, answer["max_length"], answer["buffer"])
    assert penalties.tolist() == list(answer["cases"].values())


def test_a_buffer_as_long_as_the_response_starts_at_its_first_token() -> None:
    assert overlong_penalty(torch.tensor([0, 1, 4]), 4, 4).tolist() == [0.0, -0.25, -1.0]


@pytest.mark.parametrize(("share", "tokens"), [(0.5, 4), (0.2, 2), (0.01, 1)])
def test_a_buffer_may_be_a_share_of_the_longest_response(share: float, tokens: int) -> None:
    lengths = torch.arange(9)
    assert overlong_penalty(lengths, 8, share).tolist() == overlong_penalty(lengths, 8, tokens).tolist()


@pytest.mark.parametrize("buffer", [0, -1, 5, 1.5])
def test_a_buffer_that_cannot_work_is_refused(buffer: float) -> None:
    with pytest.raises(
        UserError, match=rf"`overlong_buffer` is {buffer}; give a whole number of tokens from 1 to .* 4"
    ):
        overlong_penalty(torch.tensor([1]), 4, buffer)
