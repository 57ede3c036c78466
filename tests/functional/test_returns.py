from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from rlflow.functional import gae, last_token_rewards, reinforce_returns


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers])


def test_gae_is_that_of_the_paper(known: dict[str, Any]) -> None:
    answer = known["gae"]
    rewards, values = row(*answer["rewards"]), row(*answer["values"])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), answer["gamma"], answer["lam"])
    assert_close(advantages, row(*answer["advantages"]), rtol=0, atol=1e-6)
    assert_close(returns, row(*answer["returns"]), rtol=0, atol=1e-6)


def test_gae_bootstraps_each_response_with_its_own_value(known: dict[str, Any]) -> None:
    answer = known["gae"]
    rewards, values = row(*answer["rewards"]).repeat(2, 1), row(*answer["values"]).repeat(2, 1)
    bootstrap = torch.tensor([0.8, 0.0])
    advantages, _ = gae(rewards, values, torch.ones(2, 3), answer["gamma"], answer["lam"], bootstrap)
    expected = torch.tensor([answer["advantages_with_bootstrap_0.8"], answer["advantages"]])
    assert_close(advantages, expected, rtol=0, atol=1e-6)


def test_what_stands_on_padding_does_not_leak_into_gae() -> None:
    rewards, values = row(0.0, 1.0, 50.0, torch.nan), row(0.5, 0.6, 70.0, torch.nan)
    advantages, returns = gae(rewards, values, torch.tensor([[1, 1, 0, 0]]), 0.9, 0.8)
    expected, expected_returns = gae(rewards[:, :2], values[:, :2], torch.ones(1, 2), 0.9, 0.8)
    assert_close(advantages, torch.cat([expected, torch.zeros(1, 2)], dim=1))
    assert_close(returns, torch.cat([expected_returns, torch.zeros(1, 2)], dim=1))


def test_gae_steps_over_the_output_of_a_tool() -> None:
    # generated, tool, tool, generated: as if the two generated tokens were neighbours
    rewards, values = row(0.2, 30.0, 40.0, 1.0), row(0.5, -60.0, 70.0, 0.6)
    advantages, returns = gae(rewards, values, torch.tensor([[1, 0, 0, 1]]), 0.9, 0.8)
    # delta_2 = 1 - .6 = .4; delta_1 = .2 + .9*.6 - .5 = .24; A_1 = .24 + .72*.4 = .528
    assert_close(advantages, row(0.528, 0.0, 0.0, 0.4))
    assert_close(returns, row(1.028, 0.0, 0.0, 1.0))


def test_gae_with_lam_1_is_the_return_less_the_value() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.rand(2, 3, 6, generator=generator, dtype=torch.float64).unbind()
    advantages, returns = gae(rewards, values, torch.ones(3, 6), 0.9, 1.0)
    assert_close(returns, reinforce_returns(rewards, torch.ones(3, 6), 0.9))
    assert_close(advantages, returns - values)


def test_reinforce_returns_discount_generated_tokens_only() -> None:
    # from the end: 4; 2 + .5*4 = 4; tool; 1 + .5*4 = 3
    returns = reinforce_returns(row(1.0, 99.0, 2.0, 4.0, 7.0), torch.tensor([[1, 0, 1, 1, 0]]), 0.5)
    assert_close(returns, row(3.0, 0.0, 4.0, 4.0, 0.0))


def test_integer_rewards_are_not_rounded() -> None:
    assert_close(reinforce_returns(torch.tensor([[0, 1]]), torch.ones(1, 2), 0.5), row(0.5, 1.0))


def test_returns_are_detached() -> None:
    values = row(0.5, 0.6).requires_grad_()
    advantages, returns = gae(row(0.0, 1.0), values, torch.ones(1, 2), 1.0, 0.95)
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_no_tokens_and_no_rows_have_empty_returns() -> None:
    for shape in ((2, 0), (0, 3)):
        advantages, returns = gae(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape), 1.0, 0.95)
        assert advantages.shape == returns.shape == shape


def test_a_score_is_the_reward_of_the_last_generated_token() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])  # tool output within the second
    rewards = last_token_rewards(torch.tensor([2.0, 3.0, 5.0, 7.0]), mask)
    assert rewards.tolist() == [[0, 0, 2, 0], [0, 0, 3, 0], [0, 0, 0, 0], [0, 0, 0, 7]]


def test_a_penalty_comes_off_the_reward_of_its_token() -> None:
    penalty = torch.tensor([[0.5, 0.25, 1.0]], requires_grad=True)
    rewards = last_token_rewards(torch.tensor([2.0]), torch.ones(1, 3), penalty)
    assert rewards.tolist() == [[-0.5, -0.25, 1.0]]
    assert not rewards.requires_grad
