from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest

from rlflow.errors import UserError
from rlflow.rollout import Completion, Sampling, sampling_seed


def test_a_sampling_seed_is_the_same_everywhere() -> None:
    # printf 17/3/40/5/rollout | b2sum -l 64
    assert sampling_seed(17, 3, "rollout", (40,), 5) == 0x7760777A625DE965 >> 1


# What the function gave of (run seed, draw, node, prompt's id, sample) when samples of prompts were all there was.
OF_PROMPTS = {
    (0, 0, "rollout", 0, 0): 8705510223860151261,
    (17, 3, "rollout", 40, 5): 4301003327898842290,
    (1, 11, "greedy", 123, 0): 1784146069729483744,
    (2**31, 999, "val", 7, 15): 884633127486242290,
    (3, 2, "val_greedy", 2047, 0): 1852947265473367730,
    (0, 0, "probe", 0, 3): 5404967213205086455,
    (42, 5, "epoch", 1, 0): 2662780124875382075,
    (7, 12, "actor_loss", 0, 3): 757967036146053217,
}


def test_samples_of_prompts_keep_the_seeds_that_they_had() -> None:
    found = {key: sampling_seed(*key[:3], (key[3],), key[4]) for key in OF_PROMPTS}
    assert found == OF_PROMPTS


def test_the_seed_of_a_sample_of_a_sample_is_of_its_whole_path_call_and_turn() -> None:
    # printf 17/3/40.2/5/answer#1@7 | b2sum -l 64
    assert sampling_seed(17, 3, "answer", (40, 2), 5, call=1, turn=7) == 0x5E8F746F46515AF2 >> 1


def test_no_two_responses_of_a_run_share_a_seed() -> None:
    draws, prompts, samples = range(4), range(32), range(8)
    nodes = ("rollout", "baseline")
    parents = [(prompt,) for prompt in prompts] + [(prompt, 3) for prompt in prompts]
    keys = itertools.product(draws, nodes, parents, samples, range(2), range(2))
    assert len({sampling_seed(0, *key) for key in keys}) == 4 * 2 * 64 * 8 * 4


def test_arguments_of_a_seed_do_not_run_together() -> None:
    assert sampling_seed(1, 11, "rollout", (1,), 1) != sampling_seed(11, 1, "rollout", (1,), 1)
    assert sampling_seed(1, 1, "rollout", (1, 11), 1) != sampling_seed(1, 1, "rollout", (11, 1), 1)


def test_a_sampling_seed_has_63_bits() -> None:
    seeds = [sampling_seed(0, 0, "rollout", (prompt,), 0) for prompt in range(256)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) >= 2**62


def test_what_an_engine_recorded_comes_out_of_its_process_too() -> None:
    experts = np.arange(6).reshape(3, 2)
    sent = pickle.loads(pickle.dumps(Completion((20, 21, 2), (-0.1, -0.2, -0.3), True, {"experts": experts})))
    assert sent.columns["experts"].tolist() == experts.tolist()


def test_a_response_has_at_least_one_token() -> None:
    with pytest.raises(UserError, match="`max_tokens` is 0"):
        Sampling(0)


@pytest.mark.parametrize("temperature", [-0.5, float("nan"), float("inf")])
def test_a_temperature_that_logits_cannot_be_divided_by_is_refused(temperature: float) -> None:
    with pytest.raises(UserError, match="`temperature` is"):
        Sampling(8, temperature)
