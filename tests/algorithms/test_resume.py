"""Algorithms that remember more than weights go on from a checkpoint to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow import Optimizer
from rlflow.algorithms import DAPO, PPO, PolicyGradient
from rlflow.models.tiny import write_tiny_model
from tests.controller.runs import ZERO2, Fit, OddCharacters, StopsAfter, fit, sums
from tests.ranks import RankPool
from tests.saved import load_model

STOP = tuple(range(40, 60))  # ends the responses of a random model after about six tokens
STEPS, STOPPED = 4, 2
ADAMW = Optimizer("adamw", lr=3e-3, warmup_steps=1, schedule="linear")
SETTINGS: dict[str, Any] = {"optimizer": ADAMW, "max_response_length": 12, "epochs": 2, "samples_per_update": 4}


class RaggedPPO(PPO):
    """PPO with responses of many lengths."""

    stop_token_ids = STOP


class RaggedDAPO(DAPO):
    """DAPO with responses of many lengths."""

    stop_token_ids = STOP


class IsEven(OddCharacters):
    """A point for an even number of characters of odd code: some groups of two are worth the same."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return super().score_sample(text, row) % 2


def ppo(model: Path) -> PPO:
    critic = Optimizer("adamw", lr=1e-2)
    restraint = {"kl_coef": 0.1, "kl_target": 1e-3, "kl_horizon": 50.0}
    return RaggedPPO(str(model), OddCharacters(), group_size=2, critic_optimizer=critic, **restraint, **SETTINGS)


def dapo(model: Path) -> DAPO:
    return RaggedDAPO(str(model), IsEven(), group_size=2, **SETTINGS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("resume") / "tiny", hidden_size=64, layers=1)


def test_ppo_goes_on_to_the_bit_with_its_critic_and_its_adapted_coefficient(
    model: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    steps = goes_on_to_the_bit(ppo(model), ("model", "model-critic"), tmp_path, ranks2)
    assert len({step["actor/kl_coef"] for step in steps}) == STEPS - 1  # nothing has moved in the first step
    assert all(step["critic/grad_norm"] > 0 for step in steps)


def test_dapo_goes_on_to_the_bit_from_groups_left_over(model: Path, tmp_path: Path, ranks2: RankPool) -> None:
    steps = goes_on_to_the_bit(dapo(model), ("model",), tmp_path, ranks2)
    assert steps[STOPPED - 1]["filter/surplus"] > 0


def goes_on_to_the_bit(
    module: PolicyGradient, roles: tuple[str, ...], folder: Path, ranks: RankPool
) -> list[dict[str, float]]:
    """Check that a run that was stopped comes to what one without a stop does; the metrics of the steps of that one."""

    def run(name: str, stop: int, ckpt_path: str | None = None) -> list[dict[str, float]]:
        settings = {"max_steps": STEPS, "save_every_n_steps": STEPS, "ckpt_path": ckpt_path}
        settings["callbacks"] = [StopsAfter(stop)]
        result, _ = ranks.run(fit, Fit(module, sums(12, 4), folder / name, ZERO2, settings=settings))
        return [{key: x for key, x in step.items() if not key.startswith("time/")} for step in result.steps]

    through = run("through", STEPS)
    assert run("parts", STOPPED) == through[:STOPPED]
    assert run("parts", STEPS, ckpt_path="last") == through[STOPPED:]
    for role in roles:
        expected, found = (load_model(folder / name / role) for name in ("through", "parts"))
        assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items()), role
    return through
