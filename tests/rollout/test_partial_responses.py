"""Responses that are generated part by part: the version of each token, and where they stop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlflow.errors import UserError
from rlflow.rollout import RolloutEngine, Sampling, TransformersEngine
from rlflow.rollout.sampling import Part, is_unfinished, sample
from rlflow.values.batch import Batch
from rlflow.values.path import RowPath
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout
from tests.rollout.trained import PROMPTS, STOP, buckets, load, perturb, setup

LONGEST, SAMPLES = 23, 2


def batch() -> Batch:
    none = torch.zeros(len(PROMPTS), 0, dtype=torch.int64)
    rows = [{"number": number} for number in range(len(PROMPTS))]
    return Batch(Ragged.from_lists(PROMPTS), none, none.bool(), none.sum(dim=1), rows)


def sampled(
    engine: RolloutEngine,
    part: Part | None,
    version: int = 0,
    draw: int = 0,
    n: int = SAMPLES,
    longest: int = LONGEST,
) -> Rollout:
    """Greedily, so that a response does not depend on how it was cut."""
    ids = RowPath(torch.arange(10, 10 + len(PROMPTS))[:, None], ("batch",))
    settings = {"seed": 0, "draw": draw, "node": "rollout", "version": version, "decode": str}
    return sample(engine, batch(), ids, n, Sampling(longest, 0.0, STOP), part=part, **settings)


def test_parts_make_the_response_that_is_made_in_one_call(tied: Path) -> None:
    engine = setup(TransformersEngine(), tied)
    engine.update_weights(buckets(load(tied)), 0)
    check_parts(engine, 0)


def check_parts(engine: RolloutEngine, version: int) -> None:
    """Whatever the parts, a greedy response of an engine that holds `version` is the same."""
    whole = sampled(engine, None, version)
    begun = sampled(engine, Part(5), version)
    lengths = [begun.lengths]
    while bool(is_unfinished(begun, LONGEST).any()):
        begun = sampled(engine, Part(5, begun), version, draw=len(lengths))
        lengths.append(begun.lengths)
    for number, of_part in enumerate(lengths, start=1):
        assert torch.equal(of_part, whole.lengths.clamp(max=5 * number))
    assert bool((~whole.finished).any()), "some are cut at the longest length, in a part that is shorter"
    for name in ("response_ids", "loss_mask", "lengths", "finished", "group", "version", "versions"):
        assert torch.equal(getattr(begun, name), getattr(whole, name)), name
    assert torch.allclose(begun.logprobs, whole.logprobs, rtol=0, atol=2e-5)
    assert begun.texts == whole.texts
    assert begun.rows == whole.rows


def test_each_token_has_the_version_and_logprob_of_the_weights_that_made_it(tied: Path) -> None:
    engine, first, second = setup(TransformersEngine(), tied), load(tied), load(tied)
    perturb(second, seed=3)
    engine.update_weights(buckets(first), 7)
    begun = sampled(engine, Part(4), version=7)
    engine.update_weights(buckets(second), 9)
    rollout = sampled(engine, Part(100, begun), version=9)
    grown = ~begun.finished
    assert bool(grown.any())
    assert rollout.version.tolist() == [7] * len(rollout.lengths)
    assert torch.equal(rollout.logprobs[:, :4], begun.logprobs)
    for row, prompt in enumerate(prompt for prompt in PROMPTS for _ in range(SAMPLES)):
        length = int(rollout.lengths[row])
        versions = rollout.versions[row, :length].tolist()
        assert versions == [7] * min(4, length) + [9] * (length - 4)
        ids = torch.tensor([[*prompt, *rollout.response_ids[row, :length].tolist()]])
        for model, version in ((first, 7), (second, 9)):
            with torch.no_grad():
                logprobs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            said = logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0]
            of_version = torch.tensor(versions) == version
            assert torch.allclose(said[of_version], rollout.logprobs[row, :length][of_version], rtol=0, atol=2e-5)


def test_finished_responses_are_not_generated_further(tied: Path) -> None:
    engine = setup(TransformersEngine(), tied)
    engine.update_weights(buckets(load(tied)), 0)
    whole = sampled(engine, None)
    engine.update_weights(buckets(load(tied)), 1)
    ended = replace(whole, finished=torch.ones_like(whole.finished))
    again = sampled(engine, Part(5, ended), version=1)
    assert torch.equal(again.response_ids, whole.response_ids)
    assert torch.equal(again.versions, whole.versions)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_another_number_of_responses_than_was_begun_is_refused(n: int, tied: Path) -> None:
    engine = setup(TransformersEngine(), tied)
    engine.update_weights(buckets(load(tied)), 0)
    begun = sampled(engine, Part(2))
    with pytest.raises(UserError, match=f"^2 responses to a prompt were cut off and are to be continued, and {n} are"):
        sampled(engine, Part(2, begun), n=n)


def test_responses_longer_than_allowed_now_have_ended(tied: Path) -> None:
    engine = setup(TransformersEngine(), tied)
    engine.update_weights(buckets(load(tied)), 0)
    whole = sampled(engine, None)
    again = sampled(engine, Part(5, whole), longest=7)
    assert torch.equal(again.response_ids, whole.response_ids)
    assert not bool(is_unfinished(again, 7).any())
