"""Algorithms that remember more than weights go on from a checkpoint to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow import CausalLM, Optimizer, ValueModel
from rlflow.algorithms import DAPO, PPO, PolicyGradient
from rlflow.functional import KL
from rlflow.models.tiny import write_tiny_model
from tests.controller.runs import ZERO2, Fit, OddCharacters, StopsAfter, fit, sums
from tests.ranks import RankPool
from tests.saved import load_model

STOP = tuple(range(40, 60))  # ends the responses of a random model after about six tokens
STEPS, STOPPED = 4, 2
ADAMW = Optimizer("adamw", lr=3e-3, warmup_steps=1, schedule="linear")
UPDATES = {"epochs": 2, "samples_per_update": 4}
LONGEST = 12


@dataclass(eq=False)
class RaggedPPO(PPO):
    """PPO with responses of many lengths."""

    stop_token_ids: tuple[int, ...] = STOP


@dataclass(eq=False)
class RaggedDAPO(DAPO):
    """DAPO with responses of many lengths."""

    stop_token_ids: tuple[int, ...] = STOP


class IsEven(OddCharacters):
    """A point for an even number of characters of odd code: some groups of two are worth the same."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return super().score_sample(text, row) % 2


def actor(model: Path) -> CausalLM:
    return CausalLM(str(model), optimizer=ADAMW, **UPDATES)


def ppo(model: Path) -> PPO:
    critic = ValueModel(str(model), optimizer=Optimizer("adamw", lr=1e-2), **UPDATES)
    restraint = KL(0.1, target=1e-3, horizon=50.0)
    return RaggedPPO(actor(model), OddCharacters(), 2, LONGEST, critic=critic, kl=restraint)


def dapo(model: Path) -> DAPO:
    return RaggedDAPO(actor(model), IsEven(), 2, LONGEST)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("resume") / "tiny", hidden_size=64, layers=1)


@pytest.mark.slow
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
