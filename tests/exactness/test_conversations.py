"""Conversations: what an environment wrote is read as context, and counts nowhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlflow.testing.derivative import wide_casts
from tests.exactness.cases import CASES, REFERENCE, VARIATIONS, Case, of_samples, truth
from tests.exactness.step import one_step
from tests.exactness.step_record import LONGEST, Recording, record
from tests.exactness.step_settings import COVER, SMALL, Setting
from tests.exactness.test_algorithms import FLOAT32, FLOAT64, differences
from tests.slow import slow_but

REFUSE = ("GDPO", "ScoreCentering")  # an environment


def conversing() -> Iterator[tuple[str, Case]]:
    """Every algorithm that samples, its responses being conversations."""
    for name, case in (CASES | VARIATIONS).items():
        if case.objective is not None and case.algorithm not in REFUSE:
            yield name, replace(case, turns=True)


TURNS = (
    dict(conversing())
    | {
        "all that counts tokens": Case(
            "GRPO",
            of_samples(
                "grpo",
                kl_in_reward=True,
                kl_kind="k1",
                kl_coef=0.3,
                overlong_buffer=8,
                entropy_coef=0.1,
                importance_level="geometric",
                importance_high=1.1,
                loss_aggregation="sequence-mean-token-mean",
            ),
            models=REFERENCE,
            turns=True,
        ),
    }
    | {
        f"{name} by turn": replace(
            CASES[name],
            objective=replace(CASES[name].objective, by_turn=True),  # type: ignore[type-var]
            turns=True,
            paid="turns",
        )
        for name in ("GRPO", "RLOO", "DrGRPO", "CISPO", "GSPO")
    }
    | {"GRPO paid by turn": replace(CASES["GRPO"], turns=True, paid="turns")}
)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(tmp_path_factory.mktemp("turns"))


def test_conversations_have_several_turns_of_several_lengths(recording: Recording) -> None:
    answers = [answer for group in recording.answers for answer in group]
    assert {len(answer.segments) for answer in answers} == {1, 3, 5}
    for answer in answers:
        assert sum(answer.segments) == len(answer.tokens) <= LONGEST
        assert min(answer.segments) > 0


# Whatever looks at several tokens of a response at once, or at turns.
MATTERS = ("GRPO", "RLOO", "OPO", "REINFORCEPlusPlus", "GSPO", "GMPO", "CPGD", "OffPolicySequenceMasking", "PPO")
MATTERS += ("distillation of whole responses", "all that counts tokens", "GSPO by turn", "GRPO paid by turn")


@pytest.mark.parametrize("name", slow_but(MATTERS, TURNS))
def test_in_float64_the_step_is_the_reference_s(name: str, recording: Recording, tmp_path: Path) -> None:
    with wide_casts():
        outcomes = one_step(recording, TURNS[name], Setting(None, SMALL, precision="fp64"), tmp_path)
        found = differences(outcomes, truth(TURNS[name], recording))
    assert all(each < FLOAT64 for each in found)


WAYS = [(world_size, setting) for world_size in (1, 2) for setting in COVER[world_size]]


@pytest.mark.parametrize(
    ("name", "way"),
    slow_but(
        [("GRPO by turn", (1, COVER[1][1])), ("GRPO by turn", (2, COVER[2][3])), ("PPO", (2, COVER[2][2]))],
        itertools.product(["GRPO", "PPO", "RLOO", "GRPO by turn"], WAYS),
    ),
    ids=lambda of: of if isinstance(of, str) else f"{of[0]}-{of[1].stage}",
)
def test_on_ranks_and_stages_the_step_is_the_reference_s(
    name: str, way: tuple[int, Setting], recording: Recording, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    world_size, setting = way
    expected, ranks = truth(TURNS[name], recording), request.getfixturevalue(f"ranks{world_size}")
    for outcomes in ranks.run(one_step, recording, TURNS[name], setting, tmp_path, timeout_s=240):
        apart = differences(outcomes, expected)
        assert all(each <= FLOAT32 for each in apart), f"{setting}: {apart}"


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["all that counts tokens", "PPO"], ["all that counts tokens", "PPO", "RLOO", "KL in the reward of the sampler"]
    ),
)
def test_engine_logprobs_of_an_environments_tokens_change_no_bit(
    name: str, recording: Recording, tmp_path: Path
) -> None:
    setting = Setting(None, SMALL)
    quiet, loud = (
        one_step(recording, replace(TURNS[name], noise=noise), setting, tmp_path / str(noise)) for noise in (0.0, -7.5)
    )
    for role, outcome in quiet.items():
        for key, gradient in outcome.gradient.items():
            assert torch.equal(gradient, loud[role].gradient[key])


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_where_all_is_given_at_the_end_credit_by_turn_is_credit_by_conversation(
    name: str, recording: Recording, tmp_path: Path
) -> None:
    case = replace(TURNS[f"{name} by turn"], paid="end")
    whole = replace(case, objective=replace(CASES[name].objective, by_turn=False))  # type: ignore[type-var]
    by_turn, of_whole = (
        one_step(recording, each, Setting(None, SMALL), tmp_path / str(number))["actor"].gradient
        for number, each in enumerate((case, whole))
    )
    assert all(torch.equal(gradient, of_whole[key]) for key, gradient in by_turn.items())
