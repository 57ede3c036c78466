from __future__ import annotations

import pytest
import torch

from rlflow import UserError
from rlflow.state import ReplayBuffer
from rlflow.types import Ragged


def filled(capacity: int, rows: int) -> ReplayBuffer:
    """Row `i` is the prompt `[i]` and the response `[i] * (i % 3)`, added two at a time."""
    buffer = ReplayBuffer(capacity)
    for first in range(0, rows, 2):
        some = range(first, min(first + 2, rows))
        buffer.add(Ragged.from_lists([[i] for i in some]), Ragged.from_lists([[i] * (i % 3) for i in some]))
    return buffer


def test_the_oldest_rows_go() -> None:
    buffer = filled(capacity=5, rows=8)
    assert len(buffer) == 5
    assert {int(row) for row in buffer.sample(torch.arange(200)).prompt_ids.values} == {3, 4, 5, 6, 7}


def test_a_row_comes_whole() -> None:
    rows = filled(8, 8).sample(torch.arange(50))
    assert rows.response_ids.shape == (50, 2)
    for prompt, response, length in zip(rows.prompt_ids.rows(), rows.response_ids, rows.lengths, strict=True):
        number = int(prompt)
        assert response[:length].tolist() == [number] * (number % 3)


def test_what_a_key_draws_does_not_depend_on_other_keys() -> None:
    buffer = filled(8, 8)
    together = buffer.sample(torch.arange(100)).prompt_ids.values
    apart = [buffer.sample(keys).prompt_ids.values for keys in torch.arange(100).split(30)]  # ranks with their own
    assert torch.equal(torch.cat(apart), together)
    assert not torch.equal(buffer.sample(torch.arange(100), seed=1).prompt_ids.values, together)
    counts = torch.bincount(buffer.sample(torch.arange(4000)).prompt_ids.values)
    assert bool(((counts - 500).abs() < 100).all())  # 4.8 standard deviations of a binomial of 4000 and 1 / 8


def test_a_state_comes_back_and_a_smaller_buffer_keeps_its_last_rows() -> None:
    buffer, keys = filled(6, 9), torch.arange(20)
    same, smaller = ReplayBuffer(6), ReplayBuffer(2)
    for each in (same, smaller):
        each.load_state_dict(buffer.state_dict())
    assert torch.equal(same.sample(keys).response_ids, buffer.sample(keys).response_ids)
    assert {int(row) for row in smaller.sample(keys).prompt_ids.values} == {7, 8}


def test_mistakes_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="`capacity` of a ReplayBuffer is 0"):
        ReplayBuffer(0)
    with pytest.raises(UserError, match="was sampled before rows were added"):
        ReplayBuffer(1).sample(torch.arange(2))
    with pytest.raises(UserError, match="1 prompts and 2 responses"):
        ReplayBuffer(1).add(Ragged.from_lists([[1]]), Ragged.from_lists([[1], [2]]))
