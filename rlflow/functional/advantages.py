"""Advantages from the rewards of samples that answer the same prompt.

All advantages are constants to the gradient: they are computed from detached rewards, in float64, and returned in the
dtype of the rewards. A prompt's samples may be anywhere in the batch; samples with the same `group` belong together. If
all rewards of a group are equal, its advantages are exactly 0, even if their mean is rounded. An infinite or NaN reward
is refused, since nothing could be learned from its whole group; the error names the row.

An agent may make several rows in one episode. Rows with the same `episode` belong together. An episode counts once in
the mean and deviation of its group, however many rows it has: each of its n rows has the weight 1 / n. Rows of one
episode may have different rewards, as branches may; these differences then add to the deviation.

Samples on which a reward failed have the group `NO_GROUP`. They are left out of all means and deviations, and their
advantages are 0. If they leave only one sample in a group, its advantage is 0 too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.functional.shapes import float_dtype
from rlflow.values.path import NO_GROUP


def group_normalized_advantages(
    rewards: Tensor, group: Tensor, normalize_std: bool = True, eps: float = 1e-6, episode: Tensor | None = None
) -> Tensor:
    """`A_i = (r_i - mean_g) / (std_g + eps)`, with the unbiased standard deviation of the sample's group.

    GRPO, arXiv 2402.03300. Without the division it is the advantage of Dr. GRPO, arXiv 2503.20783. Detached.

    Args:
        rewards: `[B]`, finite; or `[B, K]`, where each column has its own advantages.
        group: `[B]` int, the prompt that each sample answers.
        normalize_std: Divide by the standard deviation (`N - 1` in its denominator).
        eps: Added to the standard deviation.
        episode: `[B]` int, equal for the rows of one episode in a group; None if each row is an episode.

    Returns:
        Advantages, in the shape of the rewards.

    Raises:
        UserError: A group has only one sample, or a reward is infinite or NaN.
    """
    samples = _GroupedSamples(rewards, group, episode)
    advantages = samples.rewards - samples.mean(samples.rewards)
    if normalize_std:
        variance = samples.sum(advantages.square()) / samples.others
        std = variance.sqrt()
        advantages = torch.where(std > 0, advantages / (std + eps), 0.0)
    return samples.returned(advantages)


def rloo_advantages(rewards: Tensor, group: Tensor, episode: Tensor | None = None) -> Tensor:
    """Leave-one-out: `A_i = r_i - mean of the other rewards of its group = K / (K - 1) (r_i - mean_g)`.

    RLOO, arXiv 2402.14740. Detached.

    Args:
        rewards: `[B]`, finite; or `[B, K]`, where each column has its own advantages.
        group: `[B]` int, the prompt that each sample answers.
        episode: `[B]` int, equal for the rows of one episode in a group; None if each row is an episode.

    Returns:
        Advantages, in the shape of the rewards.

    Raises:
        UserError: A group has only one sample, or a reward is infinite or NaN.
    """
    samples = _GroupedSamples(rewards, group, episode)
    centred = samples.rewards - samples.mean(samples.rewards)
    return samples.returned(centred * samples.in_group / samples.others)


def opo_advantages(rewards: Tensor, lengths: Tensor, group: Tensor) -> Tensor:
    """`A_i = r_i - b_g`, with the length-weighted baseline `b_g = sum_j l_j r_j / sum_j l_j` over the group.

    This baseline has the least gradient variance if the squared gradient norm of a response is proportional to its
    length. OPO, arXiv 2505.23585. Detached.

    Args:
        rewards: `[B]`, finite.
        lengths: `[B]`, response tokens of each sample.
        group: `[B]` int, the prompt that each sample answers.

    Returns:
        `[B]`.

    Raises:
        UserError: A group has only one sample, or a reward is infinite or NaN.
    """
    samples = _GroupedSamples(rewards, group)
    tokens = lengths.double()
    baseline = samples.sum(tokens * samples.rewards) / samples.sum(tokens).clamp(min=1)
    return samples.returned(samples.rewards - baseline)


def group_has_signal(rewards: Tensor, group: Tensor) -> Tensor:
    """True for samples whose group has different rewards, so that its samples can be compared.

    The condition of DAPO's dynamic sampling, arXiv 2503.14476, equation 11, for any rewards.

    Args:
        rewards: `[B]`, finite; or `[B, K]`, where differences in one column are enough.
        group: `[B]` int, the prompt that each sample answers.

    Returns:
        `[B]` bool, equal within a group; False for a sample that was dropped.

    Raises:
        UserError: A group has only one sample, or a reward is infinite or NaN.
    """
    samples = _GroupedSamples(rewards, group)
    differs = samples.sum(samples.rewards) > 0  # less the group's smallest, so all are 0 where they are equal
    return differs if differs.dim() == 1 else differs.any(dim=1)


class _GroupedSamples:
    """Rewards of samples, with sums over each sample's group.

    Attributes:
        rewards: `[B]` or `[B, K]` float64, less the smallest reward of the group: no advantage depends on that shift,
            and it makes a group of equal rewards all zeros, so that its advantages are exactly 0. 0 of dropped ones.
        in_group: `[B]` or `[B, 1]` float64, how many episodes of each sample's group count, at least 1.
        others: `in_group` less one, at least 1.
    """

    def __init__(self, rewards: Tensor, group: Tensor, episode: Tensor | None = None) -> None:
        ids, self._index, sizes = torch.unique(group, return_inverse=True, return_counts=True)
        self._groups = len(ids)
        dropped = group == NO_GROUP
        self._share: Tensor | None = None  # of each row, 1 over the rows of its episode
        if episode is not None:
            # Sorted, and not `unique`, whose number of results a device would be waited for.
            key, order = ((self._index << 32) + episode).sort()
            first = torch.ones_like(key)
            first[1:] = key[1:] != key[:-1]
            number = torch.empty_like(key).scatter(0, order, first.cumsum(0) - 1)  # of each row's episode
            one = torch.ones_like(key, dtype=torch.float64)
            self._share = 1 / torch.zeros_like(one).index_add(0, number, one)[number]
            sizes = torch.zeros_like(sizes).index_add(0, self._index[order], first)
        alone = (sizes == 1) & ~dropped.any()  # others of its group may have been dropped
        self._dropped = dropped.view(-1, *[1] * (rewards.dim() - 1))
        broken = ~(rewards.isfinite() | self._dropped)
        if torch.stack([alone.any(), broken.any()]).any():  # one wait for the device
            if len(ids[alone]):
                raise UserError(
                    f"group {ids[alone][0].item()} has 1 sample; a baseline from its group needs at least 2. "
                    "Raise `group_size`, or use an algorithm without a group baseline, such as REINFORCE++"
                )
            raise _not_finite(rewards, group, broken.nonzero()[0])
        self._dtype = float_dtype(rewards)
        raw = rewards.detach().double()
        each = (-1, *[1] * (raw.dim() - 1))
        most = raw.new_full((self._groups, *raw.shape[1:]), torch.inf)
        counted = raw.masked_fill(self._dropped, torch.inf)
        smallest = most.scatter_reduce(0, self._index.view(each).expand_as(raw), counted, "amin")
        self.rewards = self._of_counted(raw - smallest[self._index])
        self.in_group: Tensor = self.sum(torch.ones_like(self._dropped, dtype=raw.dtype)).clamp(min=1)
        self.others: Tensor = (self.in_group - 1).clamp(min=1)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the counted episodes of each sample's group, of the shape of `x`; an episode gives its mean."""
        if self._share is not None:
            x = x * self._share.view(-1, *[1] * (x.dim() - 1))
        none = x.new_zeros(self._groups, *x.shape[1:])
        of_group: Tensor = none.index_add(0, self._index, self._of_counted(x))[self._index]
        return of_group

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the counted episodes of each sample's group, of the shape of `x`."""
        mean: Tensor = self.sum(x) / self.in_group
        return mean

    def returned(self, advantages: Tensor) -> Tensor:
        """`advantages` in the rewards' dtype, 0 for dropped samples."""
        return self._of_counted(advantages).to(self._dtype)

    def _of_counted(self, x: Tensor) -> Tensor:
        return x.masked_fill(self._dropped.view(-1, *[1] * (x.dim() - 1)), 0.0)


def _not_finite(rewards: Tensor, group: Tensor, place: Tensor) -> UserError:
    row, found = int(place[0]), rewards[tuple(place)].item()
    return UserError(
        f"the reward of row {row}, of group {group[row].item()}, is {found}; a group's mean needs"
        " finite rewards. Look at what scored it, a reward model say"
    )
