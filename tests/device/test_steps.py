"""Whole runs on a device give the CPU's numbers, and nothing in them mixes the device's tensors with the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlflow import CausalLM, LoRA, RLModule, ValueModel
from rlflow.algorithms import DAPO, DPO, PPO
from rlflow.data.prompts import PromptData
from rlflow.rewards import SampleReward
from rlflow.settings import Place
from tests.algorithm_factory import made
from tests.controller.runs import SGD, Fit, OddCharacters, RaggedGRPO, Result, sums
from tests.data.list_source import Listed
from tests.device.runs import fit_on_both
from tests.ranks import RankPool
from tests.slow import slow_but

STOPS = tuple(range(40, 60))  # the random model ends a response after about six tokens
OF_THE_MACHINE = ("time/", "balance/", "exchange/held_bytes_max")  # metrics of clocks and of memory
GIVEN: dict[str, Any] = {"optimizer": SGD, "group_size": 2, "max_response_length": 12}
APART: dict[str, Any] = {"rollout": 0, "actor": 1, "reference": 1}


class OddLength(SampleReward):
    """1 for an odd number of characters, so that some groups have no signal."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return float(len(text) % 2)


@dataclass(eq=False)
class RaggedPPO(PPO):
    """PPO with responses of many lengths."""

    stop_token_ids: tuple[int, ...] = STOPS


@dataclass(eq=False)
class RaggedDAPO(DAPO):
    """DAPO with responses of many lengths."""

    stop_token_ids: tuple[int, ...] = STOPS


def grpo(policy: Path, **settings: Any) -> RLModule:
    return made(RaggedGRPO, policy, OddCharacters(), **{**GIVEN, "kl_coef": 0.1, **settings})


def ppo(policy: Path, **settings: Any) -> RLModule:
    given = {
        **GIVEN,
        "critic": ValueModel(str(policy), optimizer=SGD),
        "kl_coef": 0.1,
        "on_truncation": "bootstrap",
        **settings,
    }
    return made(RaggedPPO, policy, OddCharacters(), **given)


def dapo(policy: Path) -> RLModule:
    return made(RaggedDAPO, policy, OddLength(), samples_per_update=4, overlong_buffer=4, **GIVEN)


def dpo(policy: Path, **_: Any) -> RLModule:
    return DPO(CausalLM(str(policy), optimizer=SGD), 0.5, reference=CausalLM(str(policy)))


def pairs(count: int) -> PromptData:
    """So many a step."""
    rows = [{"question": f"{i}=", "good": "12345"[: 1 + i % 4], "bad": "987"[: 1 + i % 3]} for i in range(2 * count)]
    return PromptData(Listed(rows), None, count, response="good", rejected="bad")


def check(on_cpu: Result, on_device: Result) -> None:
    """Metrics and weights agree to float32 rounding."""
    for cpu, device in zip(on_cpu.steps, on_device.steps, strict=True):
        expected = {name: value for name, value in cpu.items() if not name.startswith(OF_THE_MACHINE)}
        found = {name: value for name, value in device.items() if not name.startswith(OF_THE_MACHINE)}
        assert found == pytest.approx(expected, rel=2e-6, abs=2e-6)
    assert on_device.weights.keys() == on_cpu.weights.keys()
    for name, weight in on_cpu.weights.items():
        assert float((on_device.weights[name] - weight).abs().max()) < 1e-5, name


ALONE: dict[str, tuple[Callable[[Path], RLModule], dict[str, Any]]] = {
    "grpo_in_several_updates": (lambda policy: grpo(policy, samples_per_update=4), {}),
    "ppo": (ppo, {}),
    "a_filter": (dapo, {}),
    "partial_rollout": (grpo, {"partial_rollout": 4}),
    "lora": (lambda policy: grpo(policy, lora=LoRA(rank=4)), {}),
    "pairs": (dpo, {}),
}


@pytest.mark.parametrize("name", slow_but(("a_filter", "lora", "pairs"), ALONE))
def test_one_process_has_the_numbers_of_the_cpu(name: str, policy: Path, tmp_path: Path, device1: RankPool) -> None:
    make, settings = ALONE[name]
    data = pairs(4) if name == "pairs" else sums(14, 4, held_out=2)
    ((on_cpu, on_device),) = device1.run(
        fit_on_both, Fit(make(policy), data, tmp_path, settings={"max_steps": 2, **settings})
    )
    check(on_cpu, on_device)


AMONG_RANKS: dict[str, tuple[Callable[[Path], RLModule], dict[str, Any]]] = {
    "rows_that_move": (grpo, {}),
    "roles_apart": (grpo, {"placement": APART}),
    "one_step_off": (grpo, {"placement": APART, "max_staleness": 1}),
    "one_step_off_with_a_filter": (dapo, {"placement": {"rollout": 0, "actor": 1}, "max_staleness": 1}),
    "partial_rollout_one_step_off": (grpo, {"placement": APART, "max_staleness": 1, "partial_rollout": 4}),
    "sequence_parallel": (grpo, {"placement": {"actor": Place([0, 1], sequence_parallel_size=2)}}),
    "a_critic_apart": (ppo, {"placement": {"rollout": 0, "actor": 0, "reference": 1, "critic": 1}}),
}
FAST = ("sequence_parallel", "a_critic_apart")


@pytest.mark.parametrize("name", slow_but(FAST, AMONG_RANKS))
def test_two_ranks_have_the_numbers_of_the_cpu(name: str, policy: Path, tmp_path: Path, device2: RankPool) -> None:
    make, settings = AMONG_RANKS[name]
    given = {"max_steps": 2, **settings}
    for on_cpu, on_device in device2.run(fit_on_both, Fit(make(policy), sums(12, 4), tmp_path, settings=given)):
        check(on_cpu, on_device)
