"""A reward for each of several datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rlflow.errors import UserError
from rlflow.rewards.reward import EarlyReward, Reward, RewardInput, Scores, read_column, scored
from rlflow.rewards.weighted_sum import OneReward, as_reward, checked_by_parts, strictest


class ByDataset(Reward):
    """Scores each response with the reward of its dataset, whose name a `Mixture` writes into a column of the row.

        ByDataset({"math": MathVerify(), "sums": ExactMatch()})

    Parts of these rewards are not logged. A reward that sends requests with several responses begins to score after the
    last response has ended.

    Args:
        rewards: The rewards by the name of the dataset, in any form that `as_reward` takes.
        column: Column of the dataset's name.
    """

    def __init__(self, rewards: Mapping[str, OneReward], column: str = "dataset") -> None:
        if not rewards:
            raise UserError("`rewards` is empty; give each dataset its reward")
        self.rewards = {name: as_reward(each) for name, each in rewards.items()}
        super().__init__(strictest(self.rewards.values()))
        self.column = column
        self.reads = {column: False}

    @property
    def drops(self) -> bool:
        return any(each.drops for each in self.rewards.values())

    @property
    def checked_by(self) -> str | None:
        return checked_by_parts(self.rewards)

    def scored_early(self) -> list[EarlyReward]:
        return [
            replace(each, scores=partial(self._scores, reward, each))
            for reward in dict.fromkeys(self.rewards.values())
            for each in reward.scored_early()
            if each.batch == 1  # which rows are in a larger one is not known before all have ended
        ]

    def _scores(self, reward: Reward, early: EarlyReward, row: dict[str, Any]) -> bool:
        return self.of(row) is reward and early.scores(row)

    def check(self, row: dict[str, Any]) -> None:
        reward = self.of(row)
        for name, may_be_null in reward.reads.items():
            read_column(row, name, may_be_null)
        reward.check(row)

    def of(self, row: Mapping[str, Any]) -> Reward:
        """The reward of a row.

        Raises:
            UserError: Its dataset has none.
        """
        name = str(read_column(row, self.column))
        if name not in self.rewards:
            raise UserError(
                f"the row is of the dataset `{name}`, and `rewards` has one for {', '.join(self.rewards)}; add it"
            )
        return self.rewards[name]

    def score(self, responses: RewardInput) -> Scores:
        whole, absent = Scores([0.0] * len(responses)), set[int]()
        for reward, places in self._places(responses):
            found = scored(reward, taken(responses, places))
            for i, score in zip(places, found.total, strict=True):
                whole.total[i] = score
            whole.failed.update({places[i]: how for i, how in found.failed.items()})
            absent |= {places[i] for i in found.absent}
            for each, values in found.metrics.items():
                whole.metrics.setdefault(each, []).extend(values)
            for each, of_samples in found.columns.items():
                column = whole.columns.setdefault(each, [None] * len(responses))
                for i, value in zip(places, of_samples, strict=True):
                    column[i] = value
        return replace(whole, absent=frozenset(absent))

    def settled(self, scores: Scores, responses: RewardInput) -> Scores:
        failed = dict(scores.failed)
        for reward, places in self._places(responses):
            absent = frozenset(number for number, i in enumerate(places) if i in scores.absent and i not in failed)
            of_it = Scores([scores.total[i] for i in places], absent=absent)
            found = reward.settled(of_it, taken(responses, places))
            failed |= {places[number]: how for number, how in found.failed.items()}
        return replace(scores, failed=failed, absent=frozenset())

    def _places(self, responses: RewardInput) -> Iterator[tuple[Reward, list[int]]]:
        """Each reward, which several datasets may share, with the places of the samples that it scores."""
        for reward in dict.fromkeys(self.rewards.values()):
            yield reward, [i for i, row in enumerate(responses.rows) if self.of(row) is reward]


def taken(responses: RewardInput, places: list[int]) -> RewardInput:
    """Some of the samples."""
    wanted = set(places)
    return replace(
        responses,
        texts=[responses.texts[i] for i in places],
        rows=[responses.rows[i] for i in places],
        conversations=[responses.conversations[i] for i in places] if responses.conversations else (),
        token_ids=lambda: [ids for i, ids in enumerate(responses.token_ids()) if i in wanted],
        places=[responses.place(i) for i in places],
    )
