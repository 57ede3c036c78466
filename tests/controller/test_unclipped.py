"""A run warns if samples of older weights are trained on by a loss that does not hold the policy near the sampler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlflow import algorithms
from rlflow.algorithms import PolicyGradient
from rlflow.rollout import TransformersEngine
from rlflow.rollout.assignment import EngineSettings
from rlflow.run.prepare import prepare
from rlflow.run.tables import unclipped
from rlflow.settings import Settings
from rlflow.strategies import SingleProcess
from tests.algorithm_factory import made
from tests.controller.runs import SGD, Fit, OddCharacters, fit, sums

WARNS = "has no clip, cap or mask that holds the policy near the one that sampled"


Warnings = Callable[..., list[str]]


@pytest.fixture
def warnings(policy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Warnings:
    """The warnings of a run of an algorithm with these settings."""

    def run(algorithm: type[PolicyGradient], settings: dict[str, Any], **given: Any) -> list[str]:
        module = made(algorithm, policy, OddCharacters(), optimizer=SGD, group_size=2, max_response_length=8, **given)
        fit(Fit(module, sums(4, 2), tmp_path / "run", settings=settings))
        return [line for line in capfd.readouterr().out.splitlines() if WARNS in line]

    return run


def test_several_updates_of_an_unclipped_loss_are_warned_of_once(warnings: Warnings) -> None:
    (line,) = warnings(algorithms.REINFORCE, {"max_steps": 2}, samples_per_update=2)
    assert "warning: a step makes 2 updates, and the loss of REINFORCE has no clip" in line


@pytest.mark.parametrize("algorithm", [algorithms.GPG, algorithms.OPO])
def test_partial_rollouts_are_warned_of_without_importance(algorithm: type[PolicyGradient], warnings: Warnings) -> None:
    (line,) = warnings(algorithm, {"partial_rollout": 8}, importance=None)
    of = f"`trainer.partial_rollout` continues responses with newer weights, and the loss of {algorithm.__name__}"
    assert of in line
    assert "set `importance`" in line


def test_samples_one_step_old_are_warned_of_without_importance(policy: Path, tmp_path: Path) -> None:
    def lines(**given: Any) -> list[str]:
        settings = {"optimizer": SGD, "group_size": 2, "max_response_length": 8, **given}
        module = made(algorithms.GRPO, policy, OddCharacters(), **settings)
        prepared = prepare(
            module,
            sums(4, 2),
            Settings(devices=2, placement={"rollout": 0, "actor": 1}, max_staleness=1, max_steps=1),
            SingleProcess(),
            EngineSettings(TransformersEngine()),
            tmp_path,
        )
        return unclipped(prepared)

    (line,) = lines(importance=None)
    assert line.startswith("warning: `trainer.max_staleness` is 1, and the loss of GRPO")
    assert lines(importance=None, samples_per_update=2)  # its clip is near the trainer's policy, not the engine's
    assert lines() == lines(importance=None, anchor="rollout") == []


@pytest.mark.parametrize(
    ("algorithm", "given"), [(algorithms.GRPO, {"samples_per_update": 2}), (algorithms.REINFORCE, {})]
)
def test_a_clip_or_samples_of_the_newest_weights_are_not_warned_of(
    algorithm: type[PolicyGradient], given: dict[str, Any], warnings: Warnings
) -> None:
    assert warnings(algorithm, {}, **given) == []
