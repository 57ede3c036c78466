"""Rewards by turn, and what belongs to a turn's tokens."""

from __future__ import annotations

import pytest
import torch

from rlflow.errors import UserError
from rlflow.functional import (
    at_turns,
    group_has_signal,
    group_normalized_advantages,
    rewards_to_go,
    rloo_advantages,
)

GROUP = torch.tensor([0, 0, 0])
RETURNS = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 0.0], [5.0, 1.0, 0.0]])
TURNS = torch.tensor([3, 1, 2])
REWARDS = torch.tensor([7.5, 3.0, 6.0])  # the first has a score of 0.5 beside what was given for turns
# 7.5 - 1 = 6.5, 6.5 - 2 = 4.5; the second stays at its only turn, the third at 6 - 5 = 1 from its second on.
TO_GO = torch.tensor([[7.5, 6.5, 4.5, 4.5], [3.0, 3.0, 3.0, 3.0], [6.0, 1.0, 1.0, 1.0]])


def test_rewards_to_go_are_those_from_a_turn_on_and_then_those_of_the_last() -> None:
    assert torch.equal(rewards_to_go(REWARDS, RETURNS, TURNS, most=4), TO_GO)


def test_each_turn_is_compared_with_that_turn_of_the_others() -> None:
    # Of turn 1: 6.5 - (3 + 1) / 2 = 4.5, 3 - (6.5 + 1) / 2 = -0.75, 1 - (6.5 + 3) / 2 = -3.75.
    assert rloo_advantages(TO_GO, GROUP)[:, 1].tolist() == [4.5, -0.75, -3.75]
    for turn in range(4):
        alone = group_normalized_advantages(TO_GO[:, turn], GROUP)
        assert torch.equal(group_normalized_advantages(TO_GO, GROUP)[:, turn], alone)


def test_a_group_has_signal_where_one_turn_differs() -> None:
    to_go = torch.tensor([[1.0, 0.0], [1.0, 0.5], [2.0, 2.0], [2.0, 2.0]])
    assert group_has_signal(to_go, torch.tensor([0, 0, 1, 1])).tolist() == [True, True, False, False]


def test_a_reward_of_a_turn_that_is_not_finite_is_named() -> None:
    to_go = TO_GO.clone()
    to_go[2, 1] = torch.nan
    with pytest.raises(UserError, match="the reward of row 2, of group 0, is nan"):
        rloo_advantages(to_go, GROUP)


def test_tokens_have_what_their_turn_has() -> None:
    turn = torch.tensor([[0, -1, 1, 1, 2], [0, 0, -1, -1, -1], [0, -1, 1, -1, -1]])
    found = at_turns(TO_GO, turn)
    assert found[0].tolist() == [7.5, 7.5, 6.5, 6.5, 4.5]
    assert found[turn >= 0].tolist() == [7.5, 6.5, 6.5, 4.5, 3.0, 3.0, 6.0, 1.0]
