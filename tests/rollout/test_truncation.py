"""Sampling from some tokens by transformers' engine, and training on it; for vLLM see `test_vllm.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlflow.errors import UserError
from rlflow.rollout import RolloutEngine, Sampling, TransformersEngine
from rlflow.rollout.sampling import sample
from rlflow.values.path import RowPath
from rlflow.values.rollout import Rollout
from rlflow.values.truncation import END, Truncation
from tests.rollout.test_continued import lively
from tests.rollout.trained import PROMPTS, buckets, load, setup
from tests.rollout.truncated import (
    MOST,
    TEMPERATURE,
    TRUNCATION,
    check_gradient,
    check_own_settings,
    check_support,
    sampled,
)


@pytest.fixture(scope="module")
def folder(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lively")
    lively(tied).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[RolloutEngine]:
    engine = TransformersEngine()
    engine.return_support(MOST)
    setup(engine, folder).update_weights(buckets(load(folder)), 0)
    yield engine
    engine.close()


def test_logprobs_are_those_of_training_over_the_tokens_that_stayed(engine: RolloutEngine, folder: Path) -> None:
    check_support(engine, folder, 0)


def test_a_prompt_may_have_settings_of_its_own(engine: RolloutEngine, folder: Path) -> None:
    check_own_settings(engine, folder, 0)


def test_the_policy_gradient_is_the_derivative_of_the_mean_reward(engine: RolloutEngine, folder: Path) -> None:
    check_gradient(engine, folder, 0)


def test_tokens_come_as_often_as_their_probabilities_say(engine: RolloutEngine, folder: Path) -> None:
    sampling, number = Sampling(1, TEMPERATURE, (), truncation=TRUNCATION), 1000
    made = engine.generate([PROMPTS[1]] * number, list(range(number)), sampling, 0)
    probs = {one.token_ids[0]: torch.tensor(one.logprobs[0]).exp().item() for one in made}
    assert sum(probs.values()) == pytest.approx(1, abs=1e-5)
    for token, p in probs.items():
        share = sum(one.token_ids[0] == token for one in made) / number
        assert abs(share - p) < 4 * (p * (1 - p) / number) ** 0.5


def test_a_cut_response_keeps_what_belongs_to_its_tokens_and_is_continued(engine: RolloutEngine) -> None:
    rollout = sampled(engine, 0)
    cut = rollout.cut(torch.full_like(rollout.lengths, 3))
    for whole, part, length in zip(rollout.support.rows(), cut.support.rows(), cut.lengths.tolist(), strict=True):
        assert part.tolist() == whole[: len(part)].tolist()
        assert part.tolist()[-1:] == ([END] if length else [])
        assert int((part == END).sum()) == length
    none = torch.empty(0, dtype=torch.int64)
    assert rollout.take(none).cut(none).support_logprobs.lengths.dtype == torch.int64
    whole, part = rollout.sampler_logprobs[:, : cut.loss_mask.shape[1]], cut.sampler_logprobs
    kept = cut.loss_mask[..., None].expand_as(part)
    assert torch.equal(part[kept], whole[..., : part.shape[-1]][kept])
    further = continued(engine, cut, TEMPERATURE)
    assert bool((further.lengths > cut.lengths).any())
    for row, length in zip(further.support.rows(), further.lengths.tolist(), strict=True):
        assert int((row == END).sum()) == length
    assert torch.isfinite(further.sampler_logprobs[further.loss_mask][:, 0]).all()
    with pytest.raises(UserError, match="3 of the 9 tokens of a response that was continued were sampled with `top_p`"):
        continued(engine, cut, 0.0)


def continued(engine: RolloutEngine, rows: Rollout, temperature: float) -> Rollout:
    sampling = Sampling(9, temperature, (0,), truncation=TRUNCATION)
    settings = {"seed": 0, "draw": 0, "node": "further", "version": 0, "decode": str, "longest": 9}
    return sample(engine, rows, RowPath(rows.path.numbers, rows.path.levels), 1, sampling, **settings)  # type: ignore[arg-type]


def test_greedy_responses_and_those_from_all_tokens_note_nothing(engine: RolloutEngine) -> None:
    for sampling in (Sampling(4, 0.0, truncation=TRUNCATION), Sampling(4, 1.0)):
        assert all(not one.columns for one in engine.generate(PROMPTS, [0] * len(PROMPTS), sampling, 0))


def test_validation_may_sample_from_more_tokens_than_training_and_notes_none(engine: RolloutEngine) -> None:
    for truncation in (Truncation(top_p=0.999), Truncation(top_k=MOST + 1), Truncation(min_p=1e-6)):
        (one,) = engine.generate([PROMPTS[1]], [0], Sampling(8, 2.0, truncation=truncation), 0)
        assert len(one.logprobs) == 8
        assert not one.columns
