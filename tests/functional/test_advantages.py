from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from rlflow.errors import UserError
from rlflow.functional import group_has_signal, group_normalized_advantages, opo_advantages, rloo_advantages
from rlflow.values.path import NO_GROUP


def one_group(size: int) -> Tensor:
    return torch.full((size,), 7, dtype=torch.int64)


def rewards_of_two_groups() -> tuple[Tensor, Tensor]:
    """Groups 3 and 11 of 3 and 2 samples, their samples mixed."""
    return torch.tensor([1.0, 5.0, 0.0, 9.0, 2.0]), torch.tensor([3, 11, 3, 11, 3])


def opo_of_equal_lengths(rewards: Tensor, group: Tensor) -> Tensor:
    return opo_advantages(rewards, torch.full_like(group, 4), group)


EVERY_ADVANTAGE = pytest.mark.parametrize(
    "advantages_of", [group_normalized_advantages, rloo_advantages, opo_of_equal_lengths]
)


def test_group_normalized_advantages_are_those_of_grpo(known: dict[str, Any]) -> None:
    rewards = torch.tensor(known["group_normalized"]["rewards"], dtype=torch.float32)
    expected = torch.tensor(known["group_normalized"]["advantages"])
    assert_close(group_normalized_advantages(rewards, one_group(4)), expected, rtol=0, atol=1e-6)


def test_without_std_they_are_those_of_dr_grpo(known: dict[str, Any]) -> None:
    rewards = torch.tensor(known["group_normalized"]["rewards"], dtype=torch.float32)
    expected = torch.tensor(known["group_normalized"]["dr_grpo"])
    assert_close(group_normalized_advantages(rewards, one_group(4), normalize_std=False), expected)


def test_rloo_leaves_the_sample_out_of_its_baseline(known: dict[str, Any]) -> None:
    rewards = torch.tensor(known["rloo"]["rewards"], dtype=torch.float32)
    assert_close(rloo_advantages(rewards, one_group(4)), torch.tensor(known["rloo"]["advantages"]), rtol=0, atol=1e-6)


def test_rloo_of_groups_of_different_sizes() -> None:
    rewards, group = rewards_of_two_groups()
    # group 3: 1 - (0+2)/2, 0 - (1+2)/2, 2 - (1+0)/2; group 11: 5 - 9, 9 - 5
    assert_close(rloo_advantages(rewards, group), torch.tensor([0.0, -4.0, -1.5, 4.0, 1.5]))


def test_opo_weighs_the_baseline_by_length() -> None:
    # (1*1 + 0*3) / (1 + 3) = 0.25 in group 0, (2*5 + 4*5) / 10 = 3 in group 1
    rewards, lengths = torch.tensor([1.0, 2.0, 0.0, 4.0]), torch.tensor([1, 5, 3, 5])
    advantages = opo_advantages(rewards, lengths, torch.tensor([0, 1, 0, 1]))
    assert_close(advantages, torch.tensor([0.75, -1.0, -0.25, 1.0]))


def test_opo_of_responses_without_tokens_is_finite() -> None:
    advantages = opo_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([4, 4]))
    assert advantages.isfinite().all()


@EVERY_ADVANTAGE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_have_an_advantage_of_exactly_zero(advantages_of: Any, dtype: torch.dtype) -> None:
    for reward in (0.7, 0.1, 1 / 3, -2.3, 1e6 / 7):
        for size in (2, 3, 7, 12, 48):
            rewards = torch.full((size,), reward, dtype=dtype)
            assert (advantages_of(rewards, one_group(size)) == 0.0).all(), (reward, size)


def test_a_group_without_variance_has_no_advantage(known: dict[str, Any]) -> None:
    rewards = torch.tensor(known["zero_variance_group"]["rewards"])
    expected = known["zero_variance_group"]["advantages"]
    assert group_normalized_advantages(rewards, one_group(len(rewards)), eps=1e-9).tolist() == expected


def test_equal_rewards_are_safe_without_eps() -> None:
    assert group_normalized_advantages(torch.full((12,), 0.7), one_group(12), eps=0.0).tolist() == [0.0] * 12


@pytest.mark.parametrize(
    ("advantages_of", "columns"),
    [
        (group_normalized_advantages, ()),
        (group_normalized_advantages, (3,)),
        (rloo_advantages, ()),
        (rloo_advantages, (3,)),
        (opo_of_equal_lengths, ()),
    ],
)
def test_samples_that_were_dropped_are_as_if_they_were_not_there(advantages_of: Any, columns: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(60, *columns, generator=generator) + 1  # above 0, so that a 0 would be the smallest
    group = torch.arange(60) % 7
    dropped = torch.rand(60, generator=generator) < 0.4
    rewards[dropped] = -torch.inf  # what a logarithm makes of their 0
    alone = group == 6
    dropped[alone.nonzero()[1:]], dropped[group == 5] = True, True  # one is left in one group, none in another
    counts = ~dropped & ~alone
    found = advantages_of(rewards, group.masked_fill(dropped, NO_GROUP))
    assert_close(found[counts], advantages_of(rewards[counts], group[counts]), rtol=0, atol=1e-7)
    assert not found[~counts].any()
    signal = group_has_signal(rewards, group.masked_fill(dropped, NO_GROUP))
    assert signal.tolist() == ((group < 5) & ~dropped).tolist()


def test_an_episode_counts_once_however_many_rows_it_has() -> None:
    rewards, group = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.zeros(4, dtype=torch.int64)
    episode = torch.tensor([0, 0, 0, 3])  # rewarded in three rows, and in one not: by hand 1 - 0.5 and 0 - 0.5
    found = group_normalized_advantages(rewards, group, normalize_std=False, episode=episode)
    assert found.tolist() == [0.5, 0.5, 0.5, -0.5]
    with pytest.raises(UserError, match=r"^group 0 has 1 sample; a baseline from its group needs at least 2"):
        rloo_advantages(rewards, group, torch.zeros(4, dtype=torch.int64))


def test_rows_of_an_episode_with_other_rewards_weigh_as_much_as_it_together() -> None:
    rewards, group = torch.tensor([0.0, 1.0, 0.5, 1.0]), torch.zeros(4, dtype=torch.int64)
    episode = torch.tensor([0, 0, 2, 3])  # mean 2/3, the variance ((4/9 + 1/9) / 2 + 1/36 + 1/9) / 2 = 5/24
    expected = torch.tensor([-2 / 3, 1 / 3, -1 / 6, 1 / 3]) / ((5 / 24) ** 0.5 + 1e-6)
    assert_close(group_normalized_advantages(rewards, group, episode=episode), expected, rtol=0, atol=1e-6)


def test_episodes_of_nearly_equal_means_have_no_advantages_without_bounds() -> None:
    rewards, group = torch.tensor([1.0, 0.0, 1.0, 0.001]), torch.zeros(4, dtype=torch.int64)
    advantages = group_normalized_advantages(rewards, group, episode=torch.tensor([0, 0, 2, 2]))
    assert_close(advantages, torch.tensor([1.0, -1.0, 1.0, -1.0]) / 2**0.5, rtol=0, atol=2e-3)  # variance 1/4 + 1/4


@pytest.mark.parametrize("advantages_of", [group_normalized_advantages, rloo_advantages])
def test_rows_of_an_episode_have_the_advantage_that_it_has_as_one_row(advantages_of: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, group = torch.rand(30, generator=generator), torch.arange(30) % 4
    rows = torch.arange(30).repeat_interleave(torch.randint(1, 5, (30,), generator=generator))
    rows = rows[torch.randperm(len(rows), generator=generator)]
    found = advantages_of(rewards[rows], group[rows], episode=rows)
    assert_close(found, advantages_of(rewards, group)[rows], rtol=0, atol=1e-6)
    assert not torch.allclose(advantages_of(rewards[rows], group[rows]), found, atol=1e-3)


@EVERY_ADVANTAGE
def test_where_the_samples_stand_does_not_matter(advantages_of: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(60, generator=generator)
    group = torch.arange(60) % 7 * 1_000_003  # groups of 8 and 9, ids far apart
    order = torch.randperm(60, generator=generator)
    assert_close(advantages_of(rewards[order], group[order]), advantages_of(rewards, group)[order], rtol=0, atol=1e-7)


GROUPS_OF_REWARDS = st.lists(
    st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=2, max_size=6), min_size=1, max_size=4
)


@EVERY_ADVANTAGE
@settings(deadline=None, max_examples=50)
@given(groups=GROUPS_OF_REWARDS, seed=st.integers(0, 99))
def test_the_advantages_of_a_group_sum_to_zero(advantages_of: Any, groups: list[list[float]], seed: int) -> None:
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.float64)
    group = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    advantages = advantages_of(rewards[order], group[order])
    for number in range(len(groups)):
        mine = advantages[group[order] == number]
        assert abs(mine.sum().item()) <= 1e-12 * (1e3 + mine.abs().sum().item())


@settings(deadline=None, max_examples=50)
@given(samples=st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 500)), min_size=2, max_size=6))
def test_the_advantages_of_opo_sum_to_zero_over_tokens(samples: list[tuple[float, int]]) -> None:
    rewards, lengths = (torch.tensor(column, dtype=torch.float64) for column in zip(*samples, strict=True))
    advantages = opo_advantages(rewards, lengths, one_group(len(samples)))
    assert abs((lengths * advantages).sum().item()) <= 1e-12 * (1e6 + (lengths * advantages).abs().sum().item())


@EVERY_ADVANTAGE
@pytest.mark.parametrize("reward", [torch.nan, torch.inf])
def test_a_reward_that_is_not_finite_is_refused_by_row_and_group(advantages_of: Any, reward: float) -> None:
    with pytest.raises(UserError, match=rf"reward of row 2, of group 41, is {reward}; a group's mean needs finite"):
        advantages_of(torch.tensor([1.0, 0.0, reward, 1.0]), torch.tensor([5, 5, 41, 41]))


@EVERY_ADVANTAGE
def test_a_group_of_one_is_refused_by_name(advantages_of: Any) -> None:
    with pytest.raises(UserError, match=r"group 41 has 1 sample.*at least 2.*`group_size`"):
        advantages_of(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([5, 41, 5]))


@EVERY_ADVANTAGE
def test_no_rows_have_no_advantages(advantages_of: Any) -> None:
    assert advantages_of(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@EVERY_ADVANTAGE
def test_advantages_are_detached_and_keep_the_dtype(advantages_of: Any) -> None:
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    advantages = advantages_of(rewards, one_group(2))
    assert advantages.dtype == torch.float64
    assert not advantages.requires_grad


def test_integer_rewards_are_not_rounded() -> None:
    assert_close(rloo_advantages(torch.tensor([1, 0, 0, 1]), one_group(4))[0], torch.tensor(2 / 3))


def test_a_group_has_a_signal_where_its_rewards_differ() -> None:
    rewards = torch.tensor([0.7, 1.0, 0.7, 0.0, 0.7, 1.0])
    group = torch.tensor([3, 1, 3, 1, 3, 1])
    assert group_has_signal(rewards, group).tolist() == [False, True, False, True, False, True]
