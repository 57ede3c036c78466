"""Rewards by turn, and the values of a turn's tokens."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.errors import UserError
from rlflow.functional import (
    at_turns,
    group_has_signal,
    group_normalized_advantages,
    rewards_to_go,
    rloo_advantages,
    subtree_rewards,
)

GROUP = torch.tensor([0, 0, 0])
RETURNS = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 0.0], [5.0, 1.0, 0.0]])
TURNS = torch.tensor([3, 1, 2])
REWARDS = torch.tensor([7.5, 3.0, 6.0])  # the first has a score of 0.5 in addition to the rewards of turns
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


def test_turns_that_rows_share_have_the_advantage_of_their_subtree() -> None:
    """TreeRL's two trunks with the rewards 1, 0 and 0, 0; the second row of the second one has a further turn."""
    rewards, group, episode = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4).long(), torch.tensor([0, 0, 2, 2])
    calls = torch.tensor([[0, 1, -1], [0, 2, -1], [3, 4, -1], [3, 5, 6]])
    found = group_normalized_advantages(subtree_rewards(rewards, calls, most=4), group, False, episode=episode)
    assert found[:, 0].tolist() == [0.5, 0.5, -0.5, -0.5]  # 2 (V - 0.25) of the trunks
    assert found[:, 1].tolist() == [1.25, -0.75, -0.25, -0.25]
    assert found[3, 2] == -0.25  # V is 0 there and before


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31))
def test_advantages_by_subtree_are_those_of_a_tree_that_is_walked(seed: int) -> None:
    """V(s) = the mean reward of the leaves below s; A(s) = [V(s) - V(root)] + [V(s) - V(parent of s)]."""
    draws = random.Random(seed)
    paths: list[list[int]] = []  # of each leaf the nodes that lead to it
    episodes = [episode for episode in range(draws.randint(2, 4)) for _ in range(draws.randint(1, 4))]
    for episode in episodes:
        there = [path for path in paths if path[0] // 10**9 == episode] or [[episode * 10**9]]
        above = draws.choice(there)[: draws.randint(1, 3)]
        paths.append([*above, *(episode * 10**9 + draws.randrange(10**8) for _ in range(draws.randint(1, 2)))])
    rewards = [draws.random() for _ in paths]
    calls = torch.tensor([[*path, *[-1] * (6 - len(path))] for path in paths])
    numbers = subtree_rewards(torch.tensor(rewards, dtype=torch.float64), calls, most=6)
    group = torch.zeros(len(paths)).long()
    found = group_normalized_advantages(numbers, group, False, episode=torch.tensor(episodes))

    def mean(of: list[float]) -> float:
        return sum(of) / len(of)

    root = mean([mean([r for r, of in zip(rewards, episodes, strict=True) if of == one]) for one in set(episodes)])
    for row, path in enumerate(paths):
        parent = root
        for turn, node in enumerate(path):
            value = mean([r for r, other in zip(rewards, paths, strict=True) if node in other])
            assert found[row, turn].item() == pytest.approx(value - root + value - parent, abs=1e-12)
            parent = value


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
