from __future__ import annotations

import pytest
import torch

from rlflow.rollout.vllm.process import RewindableGenerator


def test_a_token_taken_back_is_drawn_again() -> None:
    generator = RewindableGenerator()
    generator.manual_seed(3)
    _drawn(generator)
    generator.enter()
    first = _drawn(generator)
    for _ in range(2):
        generator.set_offset(generator.get_offset() - 4)
        assert _drawn(generator) == first
    assert generator.rewinds == 2


def test_a_rewindable_generator_draws_what_a_plain_generator_draws() -> None:
    rewindable, plain = RewindableGenerator(), torch.Generator()
    rewindable.set_state(plain.manual_seed(3).get_state())
    assert [_drawn(rewindable) for _ in range(1000)] == [_drawn(plain) for _ in range(1000)]


def test_taking_back_more_than_one_token_is_refused() -> None:
    generator = RewindableGenerator()
    generator.enter()
    with pytest.raises(AssertionError, match="moves a generator to offset -4"):
        generator.set_offset(generator.get_offset() - 8)


def _drawn(generator: torch.Generator) -> int:
    """A draw as vLLM's sampler of the CPU makes it for a token."""
    return int(torch.randint(0, 2**31, (1,), generator=generator))
