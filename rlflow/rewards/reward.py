"""The interface of rewards, and the policy for scorers that fail."""

from __future__ import annotations

import math
import numbers
import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, get_args

from rlflow.dotted_path import column_of, value_at
from rlflow.errors import ENDING, UserError, line_log, one_line
from rlflow.rewards.calls import RewardCalls

Failed = Literal["zero", "drop"]
OnError = Literal["raise", "zero", "drop"]
Messages = list[dict[str, Any]]
_Score = tuple[float, dict[str, float]]  # of one sample: the whole, and its parts by name
TAKEN = ("mean", "errors", "outcome", "overlong", "model")  # logged of a reward next to its parts
PROMPTS = ("prompt", "question")  # columns of the prompt where none is named
MAX_MESSAGE_CHARACTERS = 500  # of a scorer's error
BEST_REWARD = 1.0  # a response with at least this counts as right
LARGEST = 3.4028234663852886e38  # of float32, in which rewards are stored
DONE = {"zero": "scored 0", "drop": "dropped"}

log = line_log(__name__)


@dataclass(frozen=True)
class TrainerState:
    """Progress of the run when a reward is called, by the names of transformers' `TrainerState`.

    Attributes:
        global_step: Number of steps before this one.
        max_steps: Number of steps of the run.
        epoch: Number of passes over the dataset before the last prompts were drawn, with a fraction.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


def _none(reward: Reward, responses: RewardInput) -> None:
    """Nothing has begun."""


@dataclass(frozen=True)
class RewardInput:
    """The input of a reward: `B` responses, with their rows, conversations and token ids.

        RewardInput(["42", "41"], [{"question": "6 * 7 =", "answer": "42"}] * 2)

    Attributes:
        texts: The decoded responses, without special tokens.
        rows: The dataset's row of each response.
        prompt_column: Column of the prompt in these rows; None for `prompt`, else `question`.
        conversations: The messages of each conversation with an environment; empty for a response of one turn.
        token_ids: Function that returns the token ids of each response. They are computed only if a reward calls it.
        state: Progress of the run.
        begun: Function that returns the calls with which a reward has begun to score these responses, see
            `EarlyScores.taken`; or None.
        places: The place of each response among all of its rank, if a reward is given only some; else empty.
    """

    texts: Sequence[str]
    rows: Sequence[dict[str, Any]]
    prompt_column: str | None = None
    conversations: Sequence[Messages] = ()
    token_ids: Callable[[], list[list[int]]] = list
    state: TrainerState = TrainerState()
    begun: Callable[[Reward, RewardInput], RewardCalls | None] = field(default=_none, compare=False)
    places: Sequence[int] = field(default=(), compare=False)

    def __len__(self) -> int:
        return len(self.texts)

    def place(self, i: int) -> int:
        """The place of a sample among all of its rank, by which the calls of `begun` are known."""
        return self.places[i] if len(self.places) == len(self) else i

    def prompt(self, i: int) -> Any:
        """The prompt of a sample as the dataset has it: a text, or a list of messages; None if it has no prompt."""
        for name in PROMPTS if self.prompt_column is None else (self.prompt_column,):
            try:
                return value_at(self.rows[i], name)
            except KeyError:
                continue
        return None

    def messages(self, i: int) -> Messages:
        """A sample as messages: its conversation with an environment, or else its prompt and its response."""
        if self.conversations and self.conversations[i]:
            return self.conversations[i]
        prompt = self.prompt(i)
        asked = [] if prompt is None else [{"role": "user", "content": prompt}]
        return [*(prompt if isinstance(prompt, list) else asked), {"role": "assistant", "content": self.texts[i]}]

    def completion(self, i: int) -> str | Messages:
        """The response: a text; if the prompt is a list of messages, the messages that follow the prompt."""
        prompt = self.prompt(i)
        if not isinstance(prompt, list):
            return self.texts[i]
        messages, turns = self.messages(i), sum(each["role"] == "assistant" for each in prompt)
        own = [place for place, each in enumerate(messages) if each["role"] == "assistant"][turns:]
        return messages[own[0] :] if own else []


@dataclass(frozen=True)
class Scores:
    """The scores of `B` samples.

    Of four samples, by a sum of `exact` and half of `short`. It failed on the second, which is dropped, and `exact`
    does not apply to the last:

        total     [1.4, 0.0, 0.0, 0.3]
        parts     {"exact": [1.0, 0.0, 0.0, None], "short": [0.8, 0.0, 0.0, 0.6]}
        failed    {1: "drop"}
        metrics   {"digits": [3.0, 1.0, 1.0, 2.0]}, logged as `reward/digits`
        columns   {"judge": ["correct", "", "no number", ""]}, written to samples.jsonl

    Attributes:
        total: The reward of each sample.
        parts: Scores that went into the total, by name, each as long as `total`; no name of `TAKEN`. None for a part
            that does not apply to a sample.
        failed: Treatment of the samples that the scorer failed on, by place: the score is 0 (`zero`), or the sample is
            left out of training (`drop`, for a reward that `drops`).
        absent: Places of samples that the reward does not apply to. In a sum it does not count there; a sample that no
            reward applies to is one that the reward failed on.
        metrics: Further numbers to log, by name; their mean is logged.
        columns: Values to write with each sample in `samples.jsonl`, by name, each as long as `total`.
    """

    total: list[float]
    parts: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    absent: frozenset[int] = frozenset()
    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def dropped(self) -> list[int]:
        """Places of the samples that training leaves out."""
        return [i for i, how in self.failed.items() if how == "drop"]

    def plus(self, name: str, part: list[float]) -> Scores:
        """These scores with one more part, which is added to the total."""
        total = [ours + more for ours, more in zip(self.total, part, strict=True)]
        return replace(self, total=total, parts={**self.parts, name: part})


class Reward(ABC):
    """Scores responses.

        class Brevity(Reward):
            def score(self, responses: RewardInput) -> Scores:
                return Scores([-0.01 * len(text) for text in responses.texts])

    Args:
        on_error: Treatment of a sample whose scorer raises or returns no finite number. `raise` ends the run and names
            the sample. `zero` scores it 0. `drop` leaves the sample out: it has mask 0 in every loss that depends on
            the score, and does not count in the statistics of its group and of its step. `zero` and `drop` are counted
            as `<name>/errors` and marked in `samples.jsonl`.

    Attributes:
        reads: The columns that the reward reads of every row, and whether each may be null: `{"answer": False}`. Dots
            step into a column. A subclass sets it in `__init__`. All rows are checked before the first step, and a row
            that lacks a column is refused.
    """

    on_error: OnError = "raise"
    reads: Mapping[str, bool] = MappingProxyType({})

    def __init__(self, on_error: OnError = "raise") -> None:
        if on_error not in get_args(OnError):
            raise UserError(f"`on_error` is {on_error!r}; give raise, zero or drop")
        self.on_error = on_error

    @abstractmethod
    def score(self, responses: RewardInput) -> Scores:
        """The scores of `responses`.

        Raises:
            UserError: The scorer failed on a sample, or a row lacks what it needs.
        """

    @property
    def drops(self) -> bool:
        """Whether samples that this reward fails on may be dropped."""
        return self.on_error == "drop"

    @property
    def checked_by(self) -> str | None:
        """Name of the code of `check`. Its results for many rows are stored on disk under this name.

        None for a user's own `check`, which runs in every run, since nobody sees when its code changes.
        """
        of = type(self)
        owner = next(each for each in of.__mro__ if "check" in vars(each))
        return f"{of.__module__}.{of.__qualname__}" if owner.__module__.partition(".")[0] == "rlflow" else None

    def check(self, row: dict[str, Any]) -> None:  # noqa: B027 - most score whatever stands there
        """Refuse a row for which no response could be scored, although the row has all columns of `reads`.

        All rows are checked before the first step.

        Raises:
            UserError: Something is wrong with the row; the message says what.
        """

    def gold_of(self, row: dict[str, Any]) -> str | None:
        """A response to this row that must get at least `BEST_REWARD`, a gold answer; None if none is known.

        Some gold answers are scored before the first step. If they get less, the run is refused.
        """
        return None

    def scored_early(self) -> list[EarlyReward]:
        """Rewards that score ended responses while others are generated; empty if all responses are scored together."""
        return []

    def __str__(self) -> str:
        return type(self).__name__

    def scores_of(self, given: Iterable[Callable[[], Any]], responses: RewardInput) -> Scores:
        """The scores of samples. For a sample without a score, `on_error` decides.

        Args:
            given: Functions, one for each sample, that return a number or a mapping of parts, or raise.
            responses: The responses that are scored.

        Raises:
            UserError: A sample failed and `on_error` is `raise`; a function raised a `UserError`, since then the row or
                the configuration is wrong; or samples have different parts, since it is not known which are wrong.
        """
        scores, failures = list[_Score | None](), list[str]()
        for i, score_of in enumerate(given):
            try:
                scores.append(_score(score_of()))
            except (UserError, *ENDING):
                raise
            except BaseException as error:  # such as `asyncio.CancelledError`
                failures.append(self._failure(f"failed on sample {i} with {_message_of(error)}", responses, i, error))
                scores.append(None)
        self._warn(failures, responses)
        names = self._names(scores, responses)
        parts = {name: [0.0 if score is None else score[1][name] for score in scores] for name in names}
        total = [0.0 if score is None else score[0] for score in scores]
        return Scores(total, parts, self._failed(i for i, score in enumerate(scores) if score is None))

    def settled(self, scores: Scores, responses: RewardInput) -> Scores:
        """The scores, in which each sample that the reward does not apply to counts as failed.

        Raises:
            UserError: There is such a sample, and `on_error` is `raise`.
        """
        absent = sorted(scores.absent - scores.failed.keys())
        self._warn([self._failure(f"returned None for sample {i}", responses, i) for i in absent], responses)
        return replace(scores, failed=scores.failed | self._failed(absent), absent=frozenset())

    def _failure(self, what: str, responses: RewardInput, i: int, error: BaseException | None = None) -> str:
        failure = f"{self} {what} ({_place(responses, i)})"
        if self.on_error == "raise":
            raise UserError(f"{failure}; correct it, or set `on_error` to {' or '.join(get_args(Failed))}") from error
        return failure

    def _warn(self, failures: Sequence[str], responses: RewardInput) -> None:
        if failures:
            log.warning("%d of %d samples were %s; %s", len(failures), len(responses), DONE[self.on_error], failures[0])

    def _failed(self, places: Iterable[int]) -> dict[int, Failed]:
        how = self.on_error
        return {} if how == "raise" else dict.fromkeys(places, how)

    def _names(self, scores: Sequence[_Score | None], responses: RewardInput) -> tuple[str, ...]:
        """The names of the parts; all samples that were scored have the same."""
        parts_of = [(i, score[1]) for i, score in enumerate(scores) if score is not None]
        first = tuple(parts_of[0][1]) if parts_of else ()
        for i, parts in parts_of:
            if other := sorted(set(first) ^ parts.keys()):
                without = [part for part in other if part not in parts]
                raise UserError(
                    f"{self} gave sample {i} {'no' if without else 'a'} part `{(without or other)[0]}`, unlike the"
                    f" samples before ({_place(responses, i)}); return the same parts for every response"
                )
        return first


@dataclass(frozen=True)
class EarlyReward:
    """Part of a reward that scores responses that have ended, while others are generated.

    Attributes:
        reward: The reward, whose `score` asks `RewardInput.begun` for the calls that have begun.
        max_concurrent: Most calls that run at the same time.
        batch: Responses of one call, which are consecutive rows: the call of the rows 8 to 15 has the place 8.
        call: Returns the call that scores these responses.
        scores: Whether it scores a response to this row; only if `batch` is 1 it may leave some out.
    """

    reward: Reward
    max_concurrent: int
    batch: int
    call: Callable[[RewardInput], Callable[[], Any]]
    scores: Callable[[dict[str, Any]], bool] = lambda row: True


class SampleReward(Reward):
    """A reward that looks at one sample at a time. A sample has no time limit unless a subclass sets one.

        class Exact(SampleReward):
            def score_sample(self, text: str, row: dict[str, Any]) -> float:
                return float(text.strip() == row["answer"])

    Args:
        on_error: Treatment of a sample that it fails on, see `Reward`.
        max_concurrent: Samples that are scored at a time, in threads; for rewards that wait for other processes. Above
            1, a response is scored when it has ended, while others are generated.
    """

    def __init__(self, on_error: OnError = "raise", max_concurrent: int = 1) -> None:
        super().__init__(on_error)
        if max_concurrent < 1:
            raise UserError(f"`max_concurrent` is {max_concurrent}; score 1 sample at a time or more")
        self.max_concurrent = max_concurrent

    @abstractmethod
    def score_sample(self, text: str, row: dict[str, Any]) -> float | Mapping[str, float]:
        """The score of one response; or its parts by name, the same names for each response; their sum is the score."""

    @property
    def waits_for_others(self) -> bool:
        """Whether scoring waits for other processes, so that it takes no time from an engine that generates.

        Then responses are scored early, unless a subclass overrides `score` and not this.
        """
        return self.max_concurrent > 1

    def scored_early(self) -> list[EarlyReward]:
        # A subclass with a `score` of its own may look at all samples before it scores the first.
        if not self.waits_for_others or not issubclass(_owner(self, "waits_for_others"), _owner(self, "score")):
            return []
        return [EarlyReward(self, self.max_concurrent, 1, lambda one: self.call_of(one, 0))]

    def score(self, responses: RewardInput) -> Scores:
        calls = [self.call_of(responses, i) for i in range(len(responses))]
        return self.side_by_side(calls, responses, responses.begun(self, responses))

    def call_of(self, responses: RewardInput, i: int) -> Callable[[], Any]:
        """The call that scores sample `i`."""
        return partial(self.score_sample, responses.texts[i], responses.rows[i])

    def side_by_side(
        self, calls: Sequence[Callable[[], Any]], responses: RewardInput, begun: RewardCalls | None = None
    ) -> Scores:
        """The scores that calls return, one for each sample; at most `max_concurrent` calls run at a time.

        Args:
            calls: The call of each sample.
            responses: Responses that are scored.
            begun: Calls that have begun, and take the place of these.
        """
        if begun is None and self.max_concurrent == 1:
            return self.scores_of(calls, responses)
        with begun or RewardCalls(self.max_concurrent) as running:
            scores = [running.begin(responses.place(i), call) for i, call in enumerate(calls)]
            return self.scores_of((score.result for score in scores), responses)


def scored(reward: Reward, responses: RewardInput) -> Scores:
    """The result of `reward`, checked: a finite number in float32 for each sample, and for each of its parts.

    Those of samples that training leaves out are 0.

    Raises:
        UserError: It raises, or gives another length, or no number; or a part or metric has the name of another metric
            of rewards; or it drops samples and does not say so by `drops`; as `Reward.score`.
    """
    try:
        scores = reward.score(responses)
    except (UserError, *ENDING):
        raise
    except BaseException as error:
        raise UserError(f"{reward} raised {_message_of(error)}{_raised_at(error)}; correct it") from error
    if not isinstance(scores, Scores):
        raise UserError(
            f"{reward} returned {scores!r:.60} for {len(responses)} samples; return `rlflow.rewards.Scores`"
        )
    names = [*scores.parts, *scores.metrics]
    if taken := next((name for name in names if name in TAKEN or names.count(name) > 1), None):
        raise UserError(
            f"{reward} has a part `{taken}`, and another number is logged under this name; give the part a name other"
            f" than {', '.join(TAKEN)}"
        )
    for i, how in scores.failed.items():
        if i not in range(len(responses)) or how not in get_args(Failed):
            raise UserError(
                f"{reward} has {how!r:.60} for sample {i!r:.60}; give places below {len(responses)}, and"
                f" {' or '.join(get_args(Failed))} for each"
            )
    if scores.dropped and not reward.drops:
        raise UserError(
            f"{reward} drops sample {scores.dropped[0]}, and its property `drops` is False; let it return True"
        )
    for name, values in {"total": scores.total, **scores.parts}.items():
        if len(values) != len(responses):
            raise UserError(
                f"{reward} returned {len(values)} scores as `{name}` for {len(responses)} samples; return one for each"
            )
        for i, value in enumerate(values):
            if value is None and name != "total":
                continue
            try:
                _number(value)
            except (TypeError, ValueError, OverflowError) as error:
                raise UserError(
                    f"{reward} failed on sample {i} (`{name}`): {error} ({_place(responses, i)}); correct it"
                ) from error
    if not (out := set(scores.dropped)):
        return scores
    total = [0.0 if i in out else score for i, score in enumerate(scores.total)]
    parts = {name: [0.0 if i in out else x for i, x in enumerate(part)] for name, part in scores.parts.items()}
    return replace(scores, total=total, parts=parts)


def _owner(reward: Reward, name: str) -> type:
    """The class that gives a reward its method or property of this name."""
    return next(each for each in type(reward).__mro__ if name in vars(each))


def read_column(row: Mapping[str, Any], name: str, may_be_null: bool = False, place: str | None = None) -> Any:
    """The value of a column that a reward reads; dots step into it, as in `metadata.expression`.

    Args:
        row: Row of the dataset.
        name: Name of the column.
        may_be_null: Whether null is a value.
        place: Place of the row, for errors; None to show the row itself.

    Raises:
        UserError: The row has no such column, or null in it.
    """
    place = place or f"the row {row!r:.120}"
    try:
        value = column_of(row, name, place, ", which the reward reads")
    except UserError as error:
        raise UserError(f"{error} Correct or remove the row, or name another column in the reward") from error
    if value is None and not may_be_null:
        raise UserError(
            f"{place}: column `{name}`, which the reward reads, is null, so no response could be right; write its"
            " value, or remove the row"
        )
    return value


def _score(given: Any) -> _Score:
    """A scorer's result for a sample, as numbers of float32."""
    if not isinstance(given, Mapping):
        return _number(given), {}
    if not given:
        raise ValueError("it returned a mapping without a part")
    parts = {}
    for name, value in given.items():
        try:
            parts[str(name)] = _number(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"part `{name}`: {error}") from error
    return _number(sum(parts.values())), parts


def _number(score: Any) -> float:
    """The number in float32, as training reads it."""
    if not isinstance(score, numbers.Real):
        raise TypeError(f"it returned {score!r:.60}, not a number")
    value = float(score)
    if not math.isfinite(value):
        raise ValueError(f"it returned {value}")
    if abs(value) > LARGEST:
        raise ValueError(f"it returned {value}, which float32 cannot hold")
    return value


def _message_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error):.{MAX_MESSAGE_CHARACTERS}}"


def _raised_at(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without that of the caller here
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


def _place(responses: RewardInput, i: int) -> str:
    return f"response {responses.texts[i][:60]!r}, row {responses.rows[i]!r:.120}"
