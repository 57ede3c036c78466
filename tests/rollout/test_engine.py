from __future__ import annotations

import itertools

import pytest

from rlflow.errors import UserError
from rlflow.rollout import Sampling, sampling_seed


def test_a_sampling_seed_is_the_same_everywhere() -> None:
    # printf 17/3/40/5/rollout | b2sum -l 64
    assert sampling_seed(17, 3, "rollout", 40, 5) == 0x7760777A625DE965 >> 1


def test_no_two_responses_of_a_run_share_a_seed() -> None:
    draws, prompts, samples = range(4), range(32), range(8)
    nodes = ("rollout", "baseline")
    seeds = {sampling_seed(0, *key) for key in itertools.product(draws, nodes, prompts, samples)}
    assert len(seeds) == 4 * 2 * 32 * 8


def test_arguments_of_a_seed_do_not_run_together() -> None:
    assert sampling_seed(1, 11, "rollout", 1, 1) != sampling_seed(11, 1, "rollout", 1, 1)


def test_a_sampling_seed_has_63_bits() -> None:
    seeds = [sampling_seed(0, 0, "rollout", prompt, 0) for prompt in range(256)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) >= 2**62


def test_a_response_has_at_least_one_token() -> None:
    with pytest.raises(UserError, match="`max_tokens` is 0"):
        Sampling(0)


@pytest.mark.parametrize("temperature", [-0.5, float("nan"), float("inf")])
def test_a_temperature_divides(temperature: float) -> None:
    with pytest.raises(UserError, match="`temperature` is"):
        Sampling(8, temperature)
