"""The rows that one step trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One sampled response.

    Attributes:
        prompt_ids: Token ids, at least one.
        response_ids: Token ids, the end-of-sequence token included.
        reward: Reward of the response, by its verifier.
        group: Number of the prompt that it answers.
        loss_mask: True at tokens of the response that count; None for all.
        rollout_logprobs: The engine's; None leaves the importance weights out.
        old_logprobs: The policy's at the start of the step; None for those of the policy that is being updated.
        finished: Whether it ended by itself.
        greedy_reward: Reward of the greedy response to the same prompt, for ReMax.
        old_values: The critic's before each token at the start of the step; None for those of the critic given.
        segments: Segments of a conversation: how many tokens each turn and each answer to it has, by turns.
        turn_rewards: Reward of each turn; `reward` has them in it.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    reward: float
    group: int
    loss_mask: Sequence[bool] | None = None
    rollout_logprobs: Sequence[float] | None = None
    old_logprobs: Sequence[float] | None = None
    finished: bool = True
    greedy_reward: float | None = None
    old_values: Sequence[float] | None = None
    segments: Sequence[int] | None = None
    turn_rewards: Sequence[float] | None = None

    @property
    def turns(self) -> list[int]:
        """For each token that the policy wrote, the number of its turn."""
        assert self.segments is not None
        return [n // 2 for n, tokens in enumerate(self.segments) if n % 2 == 0 for _ in range(tokens)]

    @property
    def mask(self) -> list[bool]:
        return [True] * len(self.response_ids) if self.loss_mask is None else [bool(m) for m in self.loss_mask]
