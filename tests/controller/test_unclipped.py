"""A loss that nothing holds near the policy that sampled is warned of where samples are of older weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlflow import algorithms
from rlflow.algorithms import PolicyGradient
from tests.controller.runs import SGD, Fit, OddCharacters, fit, sums

WARNS = "has no clip, cap or mask that holds the policy near the one that sampled"


Warnings = Callable[..., list[str]]


@pytest.fixture
def warnings(policy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Warnings:
    """What a run of an algorithm with these settings is warned of."""

    def run(algorithm: type[PolicyGradient], settings: dict[str, Any], **given: Any) -> list[str]:
        module = algorithm(str(policy), OddCharacters(), SGD, group_size=2, max_response_length=8, **given)
        fit(Fit(module, sums(4, 2), tmp_path / "run", settings=settings))
        return [line for line in capfd.readouterr().out.splitlines() if WARNS in line]

    return run


def test_several_updates_of_an_unclipped_loss_are_warned_of_once(warnings: Warnings) -> None:
    (line,) = warnings(algorithms.REINFORCE, {"max_steps": 2}, samples_per_update=2)
    assert "warning: a step makes 2 updates, and the loss of REINFORCE has no clip" in line


def test_partial_rollouts_of_an_unclipped_loss_are_warned_of(warnings: Warnings) -> None:
    (line,) = warnings(algorithms.GPG, {"partial_rollout": 8})
    assert "`trainer.partial_rollout` continues responses with newer weights, and the loss of GPG" in line


@pytest.mark.parametrize(
    ("algorithm", "given"), [(algorithms.GRPO, {"samples_per_update": 2}), (algorithms.REINFORCE, {})]
)
def test_a_clip_or_samples_of_the_newest_weights_are_not_warned_of(
    algorithm: type[PolicyGradient], given: dict[str, Any], warnings: Warnings
) -> None:
    assert warnings(algorithm, {}, **given) == []
