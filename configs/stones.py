"""A game of two: take one to three stones in turns, who takes the last wins. Rows, rules, and how it is learned.

`stones_sft.yaml` and `agent_two_players.yaml` name what is here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlflow import Batch, PerSample, Rollout, node
from rlflow.algorithms import GRPO
from rlflow.data import RandomRows
from rlflow.functional import group_has_signal, group_normalized_advantages

SEATS = ("player", "opponent")
LEAST, MOST = 3, 9
TAKES = (1, 2, 3)


def game(draws: random.Random) -> dict[str, Any]:
    """A row: how many stones there are, and who begins."""
    return {"question": "take", "stones": draws.randint(LEAST, MOST), "first": draws.choice(SEATS)}


class Moves(RandomRows):
    """Moves in games of two scripts that take any number: what one of them read, and what it took.

    Args:
        size: Number of games.
        seed: Seed of the draws.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        super().__init__(game, size, seed)

    def __getitem__(self, row: int) -> dict[str, Any]:
        draws = random.Random(f"moves {self.seed}/{row}")
        played = super().__getitem__(row)
        views: dict[str, list[dict[str, str]]] = {seat: [{"role": "user", "content": "take"}] for seat in SEATS}
        left, turn, moves = played["stones"], SEATS.index(played["first"]), []
        while left:
            view, taken = views[SEATS[turn]], draws.randint(1, min(left, max(TAKES)))
            view.append({"role": "user", "content": str(left)})
            moves.append(([*view], taken))
            view.append({"role": "assistant", "content": str(taken)})
            left, turn = left - taken, 1 - turn
        messages, taken = draws.choice(moves)
        return {**played, "messages": messages, "taken": f"{taken}<|im_end|>"}


class Stones:
    """Says how many stones are left. The winner gets 1 and the loser -1; who takes what cannot be taken gets -1."""

    seats = SEATS

    def reset(self, stones: int, first: str) -> None:
        self.left, self.turn = stones, SEATS.index(first)

    def initial_observation(self) -> dict[str, Any]:
        return {"next_seat": SEATS[self.turn], "next_messages": str(self.left)}

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        mover, other = SEATS[self.turn], SEATS[1 - self.turn]
        taken = message["content"]
        if taken not in map(str, TAKES) or int(taken) > self.left:
            return {"reward": -1.0, "episode_done": True}
        self.left, self.turn = self.left - int(taken), 1 - self.turn
        if self.left == 0:
            return {"rewards": {mover: 1.0, other: -1.0}, "episode_done": True}
        return {"next_seat": other, "next_messages": str(self.left)}


@dataclass(eq=False)
class SelfPlayGRPO(GRPO):
    """GRPO in which the actor plays all seats, and in every step some games against what it was at the start.

    Games of a prompt are compared seat by seat: who begins may win by the rules alone.

    Args:
        matches: Games against the start from each prompt.
    """

    matches: int = 2

    def configure_models(self) -> None:
        super().configure_models()
        self.start = self.actor.initial()

    @node
    def advantages(self, rollout: Rollout, rewards: PerSample) -> PerSample:
        group = len(SEATS) * rollout.group + rollout.seat
        self.log("actor/useful_share", group_has_signal(rewards, group))
        return group_normalized_advantages(rewards, group, self.normalize_std)

    @node(generates=("actor", "start"))
    def match(self, batch: Batch) -> Rollout:
        rollout: Rollout = self.actor.converse(
            batch, self.environment, n=self.matches, players={"opponent": self.start}
        )
        return rollout

    @node
    def won(self, match: Rollout) -> PerSample:
        won = (match.returns.sum(dim=1) > 0).float()
        self.log("match/won", won)
        return won
