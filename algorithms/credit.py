"""Credit by turn, for conversations: rewards-to-go beside those of other conversations from the same prompt."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from rlflow import PerSample, PerToken, node
from rlflow.functional import rewards_to_go

from .scored import PolicyLengths, Scored

AdvantagesAt = Literal["conversation", "turn"]


class Earned(PolicyLengths, Protocol):
    """What each turn of a conversation was given."""

    @property
    def turns(self) -> PerSample:
        """`[B]`, how many each has."""

    @property
    def returns(self) -> Tensor:
        """`[B, K]`, the reward of each, 0 beyond a row's own."""


class TokenTurns(Protocol):
    """Which turn each token belongs to."""

    turn: PerToken  # [B, T]


@dataclass(eq=False)
class Credited(Scored):
    """Whose advantages are of whole responses, or of the turns of conversations.

        G_k = R - (e_1 + ... + e_k-1)    of turn k: R is the reward of the whole, e_j what the environment gave for j

    Turn k is compared with turn k of the group's other conversations; one that was over before stands there with its
    last turn. So every turn has the whole group to be compared with, and where all is given at the end, `turn` is
    `conversation`. Rewards of turns: arXiv 2505.11821. Their returns, compared in groups: GTPO, arXiv 2511.14846.

    Args:
        advantages_at: `conversation`: one advantage for all turns. `turn`: one for each, of what is given from it on.
    """

    advantages_at: AdvantagesAt = field(default="conversation", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.advantages_at == "conversation":
            self.turn = None

    @node
    def turn(self, rollout: TokenTurns) -> PerToken:
        return rollout.turn

    def credited(self, rollout: Earned, rewards: PerSample) -> PerSample:
        """What is compared in groups: the rewards `[B]`, or `[B, max_turns]` rewards-to-go of each turn."""
        if self.advantages_at == "conversation":
            return rewards
        return rewards_to_go(rewards, rollout.returns, rollout.turns, self.environment.max_turns)
