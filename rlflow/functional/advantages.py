"""Advantages from the rewards of samples that answer the same prompt.

All of them are constants to the gradient: they are computed from detached rewards, in float64, and returned in the
dtype of the rewards. A prompt's samples may stand anywhere in the batch; `group` says which belong together. A reward
of NaN marks a sample that could not be scored: it has no part in its group's statistics and its advantage is 0. Where
all rewards of a group are equal, its advantages are exactly 0, whatever the rounding of their mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.functional.shapes import float_dtype


def group_normalized_advantages(
    rewards: Tensor, group: Tensor, normalize_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """`A_i = (r_i - mean_g) / (std_g + eps)`, with the unbiased standard deviation of the sample's group.

    GRPO, arXiv 2402.03300. Without the division it is Dr. GRPO's, arXiv 2503.20783. Detached.

    Args:
        rewards: `[B]`; NaN marks a sample without a score.
        group: `[B]` int, the prompt that each sample answers.
        normalize_std: Divide by the standard deviation (`N - 1` in its denominator).
        eps: Added to the standard deviation.

    Returns:
        `[B]`.

    Raises:
        UserError: A group has one sample only.
    """
    samples = _GroupedSamples(rewards, group)
    advantages = samples.rewards - samples.mean(samples.rewards)
    if normalize_std:
        variance = samples.sum(advantages.square()) / (samples.scored_in_group - 1).clamp(min=1)
        std = variance.sqrt()
        advantages = torch.where(std > 0, advantages / (std + eps), 0.0)
    return samples.returned(advantages)


def rloo_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """Leave-one-out: `A_i = r_i - mean of the other rewards of its group = K / (K - 1) (r_i - mean_g)`.

    RLOO, arXiv 2402.14740. Detached.

    Args:
        rewards: `[B]`; NaN marks a sample without a score.
        group: `[B]` int, the prompt that each sample answers.

    Returns:
        `[B]`.

    Raises:
        UserError: A group has one sample only.
    """
    samples = _GroupedSamples(rewards, group)
    others = (samples.scored_in_group - 1).clamp(min=1)
    return samples.returned((samples.rewards - samples.mean(samples.rewards)) * samples.scored_in_group / others)


def opo_advantages(rewards: Tensor, lengths: Tensor, group: Tensor) -> Tensor:
    """`A_i = r_i - b_g`, with the length-weighted baseline `b_g = sum_j l_j r_j / sum_j l_j` over the group.

    It is the baseline of least gradient variance where the squared gradient norm of a response grows with its length.
    OPO, arXiv 2505.23585. Detached.

    Args:
        rewards: `[B]`; NaN marks a sample without a score.
        lengths: `[B]`, response tokens of each sample.
        group: `[B]` int, the prompt that each sample answers.

    Returns:
        `[B]`.

    Raises:
        UserError: A group has one sample only.
    """
    samples = _GroupedSamples(rewards, group)
    tokens = lengths.double()
    baseline = samples.sum(tokens * samples.rewards) / samples.sum(tokens).clamp(min=1)
    return samples.returned(samples.rewards - baseline)


def group_has_signal(rewards: Tensor, group: Tensor) -> Tensor:
    """True where the rewards of the sample's group are not all equal, so that they tell its samples apart.

    The condition of DAPO's dynamic sampling, arXiv 2503.14476, equation 11, for any rewards.

    Args:
        rewards: `[B]`; NaN marks a sample without a score.
        group: `[B]` int, the prompt that each sample answers.

    Returns:
        `[B]` bool, equal within a group.

    Raises:
        UserError: A group has one sample only.
    """
    samples = _GroupedSamples(rewards, group)
    return samples.sum(samples.rewards) > 0  # less the group's smallest, so all are 0 where they are equal


class _GroupedSamples:
    """Rewards of samples, with sums over each sample's group.

    Attributes:
        rewards: `[B]` float64, less the smallest reward of the group: no advantage depends on that shift, and it makes
            a group of equal rewards all zeros, so that its advantages are exactly 0.
        scored_in_group: `[B]` float64, how many samples of each sample's group have a score.
    """

    def __init__(self, rewards: Tensor, group: Tensor) -> None:
        ids, self._index, sizes = torch.unique(group, return_inverse=True, return_counts=True)
        self._groups = len(ids)
        _require_two(ids, sizes)
        self._dtype = float_dtype(rewards)
        raw = rewards.detach().double()
        self._scored = ~raw.isnan()
        known = raw.where(self._scored, torch.inf)
        smallest = known.new_full((self._groups,), torch.inf).scatter_reduce(0, self._index, known, "amin")
        self.rewards = (raw - smallest[self._index]).where(self._scored, 0.0)
        self.scored_in_group = self.sum(torch.ones_like(raw))

    def sum(self, x: Tensor) -> Tensor:
        """The sum `[B]` over the scored samples of each sample's group."""
        return x.new_zeros(self._groups).index_add(0, self._index, x.where(self._scored, 0.0))[self._index]

    def mean(self, x: Tensor) -> Tensor:
        """The mean `[B]` over the scored samples of each sample's group."""
        return self.sum(x) / self.scored_in_group.clamp(min=1)

    def returned(self, advantages: Tensor) -> Tensor:
        """`advantages` in the rewards' dtype; 0 for samples without a score."""
        return advantages.where(self._scored, 0.0).to(self._dtype)


def _require_two(ids: Tensor, sizes: Tensor) -> None:
    alone = ids[sizes == 1]
    if len(alone):
        raise UserError(
            f"group {alone[0].item()} has 1 sample; a baseline from its group needs at least 2. "
            "Raise `group_size`, or use an algorithm without a group baseline, such as REINFORCE++"
        )
