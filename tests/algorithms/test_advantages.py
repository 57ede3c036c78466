"""Values that algorithms compute in their own nodes, beyond the pure functions that they call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow import CausalLM, LoRA, PerSample, PerToken, Rollout
from rlflow.algorithms import CPGD, GPG, GRPO, OPO, PPO
from rlflow.context.node_context import Running
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.metrics import StepMetrics
from rlflow.models.tiny import write_tiny_model
from rlflow.rewards import SampleReward
from rlflow.run.prepare import read_graph
from rlflow.types import Ragged, RowPath
from rlflow.values.layout import Layout
from tests.controller.runs import SGD, Fit, fit, grpo, sums
from tests.node_context import node_context


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("policy"), seed=1, hidden_size=64, intermediate_size=96, layers=2)


class OneUseful(SampleReward):
    """Scores the answers to one question alone."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return float(sum(map(ord, text))) if row["question"].startswith("3") else 0.0


class RecordingGPG(GPG):
    """GPG that records rewards and advantages."""

    record: tuple[torch.Tensor, torch.Tensor]

    def advantages(self, rollout: Rollout, rewards: PerSample) -> PerSample:
        advantages = super().advantages(rollout, rewards)
        self.record = rewards, advantages
        return advantages


def test_gpg_makes_up_for_groups_without_a_signal_however_many_they_are(policy: Path, tmp_path: Path) -> None:
    module = RecordingGPG(CausalLM(str(policy), optimizer=SGD), OneUseful(), group_size=2, max_response_length=6)
    result = fit(Fit(module, sums(6, prompts_per_step=6), tmp_path / "run"))
    rewards, advantages = result.record
    useful = rewards != 0
    assert useful.sum() == 2
    # One group of six: alpha is 6, and a reward differs from the mean of two by half their difference.
    difference = (rewards[useful][0] - rewards[useful][1]).item()
    assert difference != 0
    assert advantages[useful].tolist() == pytest.approx([3 * difference, -3 * difference], rel=1e-6)
    assert not advantages[~useful].any()


class Noisy(PPO):
    """PPO whose critic knows nothing; records what the samples earned and what it says of them."""

    record: tuple[torch.Tensor, torch.Tensor]

    def values(self, rollout: Rollout) -> PerToken:
        noise = torch.randn(rollout.loss_mask.shape, generator=torch.Generator().manual_seed(0))
        return 100 * noise * rollout.loss_mask  # rewards are in the hundreds

    def advantages(self, rollout: Rollout, estimates: Any, rewards: PerSample, values: PerToken) -> PerToken:
        known = rollout.loss_mask
        if self.on_truncation == "bootstrap":
            known = known & rollout.finished[:, None]
        self.record = rewards[:, None].expand_as(values)[known], values[known]
        return super().advantages(rollout, estimates)


@pytest.mark.parametrize(
    "settings", [{}, {"critic_lam": 0.5}, {"on_truncation": "bootstrap", "max_response_length": 96}]
)
def test_a_critic_explains_what_was_earned_and_not_what_it_says_itself(
    policy: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    module = Noisy(
        CausalLM(str(policy), optimizer=SGD), OneUseful(), group_size=4, **{"max_response_length": 8, **settings}
    )
    result = fit(Fit(module, sums(6, prompts_per_step=6), tmp_path / "run"))
    earned, values = (x.double() for x in result.record)
    assert earned.var() > 0
    expected = 1 - (earned - values).var() / earned.var()
    assert result.steps[0]["critic/explained_variance"] == pytest.approx(expected.item(), abs=1e-4)


def test_dropout_of_adapters_is_not_part_of_the_policy_that_sampled(policy: Path, tmp_path: Path) -> None:
    module = grpo(policy, lora=LoRA(rank=8, alpha=64.0, dropout=0.5))
    assert "old_logprobs" in read_graph(module).nodes
    for step in fit(Fit(module, sums(9, 3), tmp_path / "run", settings={"max_steps": 3})).steps:
        assert step["sync/logprob_gap_max"] < 1e-4


def rows_of_agents() -> Rollout:
    """Two prompts with two episodes each; the first of prompt 4 has three rows, all others have one.

    Of the 6, 6 and 5 tokens of the three rows, 0, 4 and 2 are those of an earlier row.
    """
    lengths = torch.tensor([6, 6, 5, 4, 3, 3])
    own = torch.arange(6) < lengths[:, None]
    inherited = torch.tensor([0, 4, 2, 0, 0, 0])
    path = torch.tensor([[4, 0], [4, 1], [4, 2], [4, 3], [7, 0], [7, 1]])
    return Rollout(
        prompt_ids=Ragged.from_lists([[1]] * 6),
        response_ids=own.long(),
        loss_mask=own & (torch.arange(6) >= inherited[:, None]),
        lengths=lengths,
        logprobs=own.float(),
        finished=lengths > 0,
        path=RowPath(path, ("batch", "rollout")),
        version=lengths * 0,
        versions=own.int(),
        inherited=inherited,
        branch=torch.tensor([0, 1, 2, 0, 0, 0]),
        ended=lengths * 0,
        texts=[""] * 6,
        rows=[{}] * 6,
    )


@pytest.mark.parametrize(
    ("algorithm", "settings", "expected"),
    [
        # Of four episodes those of prompt 4 are useful, so alpha and w are 2; the mean of 1 and 0 is 0.5.
        (GPG, {}, [1.0, 1.0, 1.0, -1.0]),
        (CPGD, {"weight": "filter"}, [1.0, 1.0, 1.0, -1.0]),
        (GRPO, {"normalize_std": False}, [0.5, 0.5, 0.5, -0.5]),
        (OPO, {}, [4 / 15, 4 / 15, 4 / 15, -11 / 15]),  # 6 + 2 + 3 tokens have the reward 1, and 4 have 0
    ],
)
def test_an_episode_of_several_rows_counts_once(algorithm: Any, settings: Any, expected: list[float]) -> None:
    found, useful = of_agents(algorithm(CausalLM("tiny"), OneUseful(), group_size=2, **settings))
    assert found.tolist() == pytest.approx([*expected, 0.0, 0.0], abs=1e-6)
    assert useful == [2.0, 4.0]  # of the episodes


def test_a_dropped_episode_is_neither_useful_nor_useless() -> None:
    dropped = torch.tensor([False, False, False, False, True, True])
    assert of_agents(GRPO(CausalLM("tiny"), OneUseful(), group_size=2), dropped)[1] == [2.0, 2.0]


def of_agents(module: Any, dropped: torch.Tensor | None = None) -> tuple[torch.Tensor, list[float]]:
    """The advantages of `rows_of_agents`, the rewards 1 but of the fourth row; sum and count of the useful share."""
    context, here, metrics, rollout = node_context(), Layout((0,), 1), StepMetrics(0), rows_of_agents()
    module.attach(context)
    ids = torch.arange(6)
    space = RowSpace.gather("rollout", Transport(), here, path=rollout.path.numbers, lengths=ids, tokens=ids)
    node = read_graph(module).nodes["advantages"]
    context.running = Running(node, space, here, draw=0, versions={}, metrics=metrics, dropped=dropped)
    found = module.advantages(rollout, torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0]))
    return found, metrics.logged["actor/useful_share"].here
