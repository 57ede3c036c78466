"""Turns fed to an engine one by one, while others are in progress."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlflow.rollout import Completion, RolloutEngine, Sampling
from rlflow.rollout.engine import GenerationRequest
from tests.rollout.trained import PROMPTS, STOP

SAMPLING = Sampling(24, 1.0, STOP)
SEEDS = list(range(len(PROMPTS)))


def turns(sampling: Sampling) -> dict[int, GenerationRequest]:
    return {at: GenerationRequest(prompt, SEEDS[at], sampling.max_tokens) for at, prompt in enumerate(PROMPTS)}


def stepped(engine: RolloutEngine, sampling: Sampling, version: int) -> list[Completion]:
    """The results of `generate` for `PROMPTS` and `SEEDS`, where each prompt comes a step after the one before it."""
    ended: dict[int, Completion] = {}
    for at, turn in turns(sampling).items():
        ended |= engine.step({at: turn}, sampling, version)
    while len(ended) < len(PROMPTS):
        ended |= engine.step({}, sampling, version)
    return [ended[at] for at in range(len(PROMPTS))]


def check_steps(engine: RolloutEngine, version: int) -> None:
    """Other rows change nothing, in an engine that holds `version`; and turns that are given up are gone."""
    at_once = engine.generate(PROMPTS, SEEDS, SAMPLING, version)
    assert_alike(stepped(engine, SAMPLING, version), at_once)
    engine.step(turns(SAMPLING), SAMPLING, version)
    engine.abort()
    assert engine.step({}, SAMPLING, version) == {}
    assert_alike(stepped(engine, SAMPLING, version), at_once)


def check_completions(engine: RolloutEngine, version: int, by_length: bool = True) -> None:
    """Responses that come when they have ended are those of one call, to the bit.

    Args:
        engine: An engine that holds `version`.
        version: The version.
        by_length: Whether the shorter ones come first, for the engine grows all of them together.
    """
    limits = (16, 2, 24, 1, 8, 12)
    sampling = Sampling(max(limits), 1.0, STOP, limits)
    found = list(engine.completions(PROMPTS, SEEDS, sampling, version))
    assert sorted(at for at, _ in found) == SEEDS
    expected = engine.generate(PROMPTS, SEEDS, sampling, version)
    assert [dict(found)[at] for at in SEEDS] == expected
    lengths = [len(completion.token_ids) for _, completion in found]
    assert len({*lengths}) > 3
    assert (lengths == sorted(lengths)) == by_length


def assert_alike(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert [each.finished for each in found] == [each.finished for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
