"""The chain task: `k:s` asks for 64 digits, each the one before plus k, modulo 10; s is the one before the first.

The reward is 1 only if all digits are right, so a slip at one token decides 64 of them, and a value, an advantage or a
mask that lies at the wrong token shows. A model that is taught chains with slips knows the rule and follows it
unsurely, which is what reinforcement learning can correct.
"""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import torch

from rlflow import Batch, PerToken, node
from rlflow.algorithms import SFT
from rlflow.data.sources import Source

DIGITS = 64
PROMPTS = [(k, s) for k in range(1, 10) for s in range(10)]


class Chains(Source):
    """Rows of `prompt`, the right `answer`, and a `response` with slips, from which the chain goes on.

    Args:
        size: Rows, each of a prompt drawn by the seed; None for all 90 prompts once.
        seed: Seed of prompts and slips.
        slip: A digit is another, drawn at random, with a probability of `slip` k.
    """

    def __init__(self, size: int | None = None, seed: int = 0, slip: float = 0.0) -> None:
        self.size = size
        self.seed = seed
        self.slip = slip

    @property
    def name(self) -> str:
        return "chains"

    def __len__(self) -> int:
        return len(PROMPTS) if self.size is None else self.size

    def __getitem__(self, row: int) -> dict[str, Any]:
        draws = random.Random(f"{self.seed}/{row}")
        k, s = PROMPTS[row] if self.size is None else draws.choice(PROMPTS)
        return {"prompt": f"{k}:{s}", "answer": chain(k, s), "response": self._with_slips(k, s, draws)}

    def _with_slips(self, k: int, s: int, draws: random.Random) -> str:
        steps = (k + (draws.randrange(1, 10) if draws.random() < self.slip * k else 0) for _ in range(DIGITS))
        return "".join(str(digit % 10) for digit in list(accumulate(steps, initial=s))[1:])


def chain(k: int, s: int) -> str:
    """The right answer."""
    return "".join(str((s + i * k) % 10) for i in range(1, DIGITS + 1))


class EndlessSFT(SFT):
    """SFT of all tokens but the last: an answer is cut at 64 digits, so the model need not count where it ends."""

    @node(role="actor", type="train")
    def actor_loss(self, batch: Batch) -> PerToken:
        logprobs = self.actor.logprobs(batch)
        last = batch.lengths[:, None] - 1
        return -logprobs.where(torch.arange(logprobs.shape[1]) < last, 0.0)
