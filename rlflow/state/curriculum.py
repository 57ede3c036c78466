"""Chooses prompts that are neither too easy nor too hard, by the share of their samples that passed."""

from __future__ import annotations

import copy
import math
from typing import Self

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.state.prompt_memory import PromptMemory

ROUNDING = 1e-9  # of a pass rate: 0.2 is in a range from 0.2


class Curriculum(PromptMemory):
    """Chooses the prompts of an epoch by their pass rate: the share of a prompt's samples that passed so far.

    The first epoch draws all prompts. A later epoch draws the prompts whose pass rate is in the range, and those
    without one. It also draws some others at random, so that a prompt can come back when the policy has changed.
    If these are fewer than a step takes, the prompts nearest to the range are added.

    Why a range: if rewards are 0 or 1, the improvement that a prompt can give grows with the variance of its rewards,
    arXiv 2504.03380. Success rates are tracked during training as in arXiv 2501.12599.

    Args:
        min_pass_rate: Pass rate below which a prompt is too hard.
        max_pass_rate: Pass rate above which a prompt is too easy.
        pass_reward: Smallest reward with which a sample passes; the reward is the one whose mean is `reward/mean`.
        recheck: Share of the prompts outside the range that an epoch draws nevertheless.
        decay: Weight of a prompt's earlier samples each time that the prompt is sampled again: with 1 all samples count
            alike, with 0 only those of the last time count.
    """

    def __init__(
        self,
        min_pass_rate: float = 0.2,
        max_pass_rate: float = 0.8,
        pass_reward: float = 1.0,
        recheck: float = 0.1,
        decay: float = 0.5,
    ) -> None:
        super().__init__(decay)
        if not 0 <= min_pass_rate <= max_pass_rate <= 1:
            raise UserError(
                f"`min_pass_rate` is {min_pass_rate} and `max_pass_rate` {max_pass_rate}; give shares from 0 to 1, the"
                " smaller first"
            )
        if not 0 <= recheck <= 1:
            raise UserError(f"`recheck` is {recheck}; it is a share of prompts, from 0 to 1")
        if not math.isfinite(pass_reward):
            raise UserError(f"`pass_reward` is {pass_reward}; give the reward of a response that is right, such as 1")
        self.min_pass_rate = min_pass_rate
        self.max_pass_rate = max_pass_rate
        self.pass_reward = pass_reward
        self.recheck = recheck
        self._per_step = 1

    def begun(self, per_step: int) -> Self:
        """The same curriculum for a run with `per_step` prompts a step, with nothing measured."""
        made = copy.copy(self)
        made._per_step = per_step
        made.load_state_dict({"prompts": [], "moments": []})
        return made

    def choose(self, epoch: int, prompts: Tensor) -> Tensor:
        """The prompts that an epoch draws, in the order in which they are given.

        Args:
            epoch: Epoch, from 0; what is drawn by chance follows from it.
            prompts: `[N]` int64, places in the dataset.
        """
        rates = self.mean(prompts)
        away = torch.maximum(self.min_pass_rate - rates, rates - self.max_pass_rate).nan_to_num(0.0)
        chance = torch.rand(len(prompts), generator=torch.Generator().manual_seed(epoch))
        drawn = (away <= ROUNDING) | (chance < self.recheck)
        lacking = max(0, self._per_step - int(drawn.sum()))
        drawn[away.masked_fill(drawn, math.inf).argsort(stable=True)[:lacking]] = True
        return prompts[drawn]

    def shares(self, prompts: Tensor) -> tuple[float, float]:
        """Shares of these prompts `[N]` that are too hard and too easy."""
        rates = self.mean(prompts)
        hard, easy = rates < self.min_pass_rate - ROUNDING, rates > self.max_pass_rate + ROUNDING
        return float(hard.double().mean()), float(easy.double().mean())

    def learn(self, prompts: Tensor, x: Tensor) -> None:
        """Learn which samples of one step passed; see `PromptMemory.learn`.

        Raises:
            UserError: No sample of the first step was measured.
        """
        if not len(prompts) and not len(self.state_dict()["prompts"]):
            raise UserError(
                "`data.curriculum` is set, and no sample of the first step has a reward that counts for `reward/mean`;"
                " score in a node with `self.reward_function(rollout)`, or leave the curriculum out"
            )
        super().learn(prompts, x)
