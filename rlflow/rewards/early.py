"""`EarlyScores`: scores responses as they end, while others are still generated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlflow.errors import UserError
from rlflow.rewards.calls import RewardCalls
from rlflow.rewards.reward import EarlyReward, Messages, Reward, RewardInput

LAST_SECONDS = 1.0  # that calls are waited for whose scores nobody will read

# Called with the place of a response among its rank's, its text, its row of the dataset, and its conversation.
OnEnd = Callable[[int, str, dict[str, Any], Messages], None]


class EarlyScores:
    """The calls by which rewards score the responses of one rollout on this rank, as soon as these have ended.

    `add` is called with each response that has ended. `RewardInput.begun` of the whole rollout is `taken`, by which the
    reward finds the calls that have begun; it makes the others itself. So a failure is reported where the reward is
    called.

    Args:
        reward: The reward, a sum of rewards, or those of datasets; some of them may score early.
        prompt_column: See `RewardInput`.

    Attributes:
        unused: Whether there are calls that the reward did not take, since it was called with other responses.
    """

    def __init__(self, reward: Reward, prompt_column: str | None) -> None:
        self._prompt_column = prompt_column
        self._rewards = [(each, RewardCalls(each.max_concurrent)) for each in reward.scored_early()]
        self._untaken = dict(enumerate(self._rewards))
        self._ended: dict[int, tuple[str, dict[str, Any], Messages]] = {}

    @property
    def unused(self) -> bool:
        return any(calls.count for _, calls in self._untaken.values())

    def add(self, place: int, text: str, row: dict[str, Any], messages: Messages) -> None:
        """Score a response that has ended; a reward with larger batches begins when a batch is complete."""
        self._ended[place] = text, row, messages
        for how, calls in self._rewards:
            first = place // how.batch * how.batch
            if all(each in self._ended for each in range(first, first + how.batch)) and how.scores(row):
                self._begin(how, calls, first)

    def taken(self, reward: Reward, responses: RewardInput) -> RewardCalls | None:
        """The calls of this reward, once; None if it has none, or if they did not score just these responses."""
        found = next((at for at, (how, _) in self._untaken.items() if how.reward is reward), None)
        if found is None:
            return None
        if not self._scored(self._untaken[found][0], responses):
            self._untaken[found][1].close()  # before it makes others: no more run at once than it allows
            return None
        return self._untaken.pop(found)[1]

    def spans(self) -> list[tuple[str, float, float]]:
        """The early calls, with their start and end in seconds of `time.perf_counter`."""
        return [
            (f"{how.reward}, {calls.count} calls", calls.began, calls.ended)
            for how, calls in self._rewards
            if calls.began is not None and calls.ended is not None
        ]

    def close(self) -> None:
        """Give up the calls that were not taken; those that run are waited for at most `LAST_SECONDS`."""
        for _, calls in self._untaken.values():
            calls.close(LAST_SECONDS)

    def _begin(self, how: EarlyReward, calls: RewardCalls, first: int) -> None:
        texts, rows, conversations = zip(*(self._ended[first + i] for i in range(how.batch)), strict=True)
        with suppress(UserError):  # the reward raises it again when all responses are there
            calls.begin(first, how.call(RewardInput(texts, rows, self._prompt_column, conversations)))

    def _scored(self, how: EarlyReward, responses: RewardInput) -> bool:
        """Whether these are the responses that have ended and that the reward scores, each in its place."""
        if responses.prompt_column != self._prompt_column:
            return False
        messages = responses.conversations or [[]] * len(responses)
        samples = enumerate(zip(responses.texts, responses.rows, messages, strict=True))
        given = {responses.place(i): sample for i, sample in samples}
        return all(given.get(at) == ended for at, ended in self._ended.items() if how.scores(ended[1]))
