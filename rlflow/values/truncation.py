"""Sampling from some of the likeliest tokens: which tokens stay, and how a rollout records them.

Where tokens are cut off, a token is sampled from the probabilities of the others, divided by their sum. Its
log-probability in a loss is over the same tokens, its *support*. Else the loss and the engine have other distributions,
and a ratio of their probabilities is biased (DeepSeek-V3.2, arXiv 2512.02556, section 3.1: "Keep Sampling Mask").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.values.ragged import Ragged

SUPPORT = "support"  # the column of a `Rollout`
TEMPERATURE = "temperature"  # the column with the temperature of rows that have one of their own
SUPPORT_LOGPROBS = "support_logprobs"  # the column with the engine's log-probability for each of its entries
NOTED = (SUPPORT, SUPPORT_LOGPROBS)
END = -1  # in the first column: behind the tokens of a place


@dataclass(frozen=True)
class Truncation:
    """The tokens from which sampling draws. With the defaults, these are all tokens.

    At each place of a response, logits are divided by the temperature, and then, in the order of vLLM:

    1. `min_p` cuts off tokens whose probability is below `min_p` times that of the likeliest token.
    2. `top_k` cuts off all but the `top_k` likeliest tokens.
    3. `top_p` keeps the smallest set of likeliest tokens whose probabilities add up to at least `top_p`, and cuts off
       the others. These probabilities are over the tokens that `min_p` and `top_k` left.

    With the probabilities 0.5, 0.3, 0.15, 0.05, `top_p: 0.7` leaves the first two tokens. They are then sampled with
    the probabilities 0.625 and 0.375. If tokens have equal probabilities, the engine decides which of them stay.

    Args:
        top_p: Sum of probabilities, from above 0 to 1.
        top_k: Number of tokens, 1 or more; None for no limit.
        min_p: Share of the likeliest token's probability, from 0 to below 1.
    """

    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.top_p <= 1:
            raise UserError(f"`top_p` is {self.top_p}; give a probability above 0, at most 1 (1 cuts off nothing)")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"`top_k` is {self.top_k}; give a number of tokens, 1 or more, or null for no limit")
        if not 0 <= self.min_p < 1:
            raise UserError(f"`min_p` is {self.min_p}; give a share from 0 (cuts off nothing) to below 1")

    def __bool__(self) -> bool:
        """Whether any tokens are cut off."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0

    def __str__(self) -> str:
        """The settings that cut off tokens, such as `top_p: 0.9, top_k: 64`."""
        given = {"top_p": self.top_p < 1, "top_k": self.top_k is not None, "min_p": self.min_p > 0}
        return ", ".join(f"{name}: {getattr(self, name)}" for name, cuts in given.items() if cuts)

    def kept(self, logits: Tensor) -> Tensor:
        """`[n, V]` bool, the tokens that stay; of `logits` `[n, V]` divided by the temperature. Each row has some."""
        least = logits.amax(-1, keepdim=True) + (math.log(self.min_p) if self.min_p else -math.inf)
        if self.top_k is None and self.top_p == 1:
            return logits >= least
        number = logits.shape[-1] if self.top_k is None else min(self.top_k, logits.shape[-1])
        likeliest, ids = logits.topk(number, dim=-1)  # in order
        stays = likeliest >= least
        if self.top_p < 1:
            probs = likeliest.masked_fill(~stays, -math.inf).softmax(-1)
            stays &= probs.cumsum(-1) - probs < self.top_p  # the probability of the likelier tokens
        return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, ids, stays)


def noted(logprobs: Tensor, chosen: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The entries of the columns `support` and `support_logprobs` for a place of each row.

    They are the other tokens that stayed, and `END`, which has the log-probability of the chosen token.

    Args:
        logprobs: `[n, V]`, over the tokens that stayed; `-inf` for others.
        chosen: `[n]` int64, the sampled tokens.
    """
    others = (logprobs > -torch.inf).scatter(-1, chosen[:, None], False)
    counts = others.sum(-1).tolist()
    ids = others.nonzero()[:, 1].to("cpu", torch.int32).split(counts)
    of_others, of_chosen = (
        logprobs[others].float().cpu().split(counts),
        logprobs.gather(-1, chosen[:, None]).float().cpu(),
    )
    end = torch.tensor([END], dtype=torch.int32)
    return [
        (torch.cat([tokens, end]), torch.cat([theirs, own]))
        for tokens, theirs, own in zip(ids, of_others, of_chosen, strict=True)
    ]


def by_token(support: Ragged, values: Tensor, lengths: Tensor, fill: Tensor) -> Tensor:
    """`[R, K]`: for each of R response tokens a value for each token of its support, itself last.

    Args:
        support: The column, on the CPU.
        values: `[sum]`, a value for each entry of the column.
        lengths: `[B]` int64, response tokens of each row, on the CPU; R is their sum.
        fill: `[R]`, the value of the places behind, and of all places of a token without a support.
    """
    ends = support.values == END
    noted = (support.lengths > 0).repeat_interleave(lengths)  # [R]
    assert int(ends.sum()) == int(noted.sum()), "each token of a row with entries has its own"
    counts = torch.diff(ends.nonzero()[:, 0], prepend=torch.tensor([-1]))  # entries of each token, the end included
    token = noted.nonzero()[:, 0].repeat_interleave(counts)  # of the R, for each entry
    place = torch.arange(len(values)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    found = fill[:, None].repeat(1, int(counts.max()))
    found[token, place] = values
    return found
