"""What scores responses: the interface, and the policy for scorers that fail."""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from rlflow.errors import ENDING, UserError, did_you_mean, one_line
from rlflow.loggers.log_lines import line_log
from rlflow.loggers.secrets import text_without_secrets

LeftOut = Literal["mask", "skip"]
OnError = Literal["raise", "zero", "mask", "skip"]
TAKEN = ("mean", "errors", "outcome", "overlong", "model")  # what is logged of a reward beside its parts
MOST_SAID = 500  # characters of what a scorer raised
LARGEST = 3.4028234663852886e38  # of float32, in which rewards are kept
DONE = {"zero": "scored 0", "mask": "scored 0 and masked", "skip": "scored 0, and their updates are skipped"}

log = line_log(__name__)


@dataclass(frozen=True)
class Scores:
    """The scores of `B` samples.

    Attributes:
        total: The reward of each sample.
        parts: Scores that went into the total, by name, each as long as `total`; no name of `TAKEN`.
        errors: How many samples the scorer failed on and were scored 0.
        left_out: Those of them, by place, that training leaves out: `mask` takes the sample out of the loss, `skip`
            leaves out each update that it is in. For a reward that `leaves_out`.
    """

    total: list[float]
    parts: dict[str, list[float]] = field(default_factory=dict)
    errors: int = 0
    left_out: dict[int, LeftOut] = field(default_factory=dict)

    def plus(self, name: str, part: list[float]) -> Scores:
        """These scores and a further part, which is added to the total."""
        total = [ours + more for ours, more in zip(self.total, part, strict=True)]
        return replace(self, total=total, parts={**self.parts, name: part})


class Reward(ABC):
    """Scores responses. A response is the decoded text, special tokens left out; a row is the dataset's."""

    @abstractmethod
    def score(self, texts: Sequence[str], rows: Sequence[dict[str, Any]]) -> Scores:
        """The scores of `texts`, each an answer to the row at its place.

        Raises:
            UserError: The scorer failed on a sample, or a row lacks what it needs.
        """

    @property
    def leaves_out(self) -> bool:
        """Whether training may be told to leave out samples that this reward fails on."""
        return False

    @property
    def reads(self) -> dict[str, bool]:
        """The columns that it reads of every row, dots step into one, and whether they may hold null.

        All rows are looked at before the first step; one that lacks a column is refused.
        """
        return {}

    def __str__(self) -> str:
        return type(self).__name__


def scored(reward: Reward, texts: Sequence[str], rows: Sequence[dict[str, Any]]) -> Scores:
    """What `reward` gives, checked: a finite number in float32 for each sample, and each part likewise.

    Raises:
        UserError: It gives another length, or no number, or a part has the name of another metric of rewards, or it
            leaves out what it may not; as `Reward.score`.
    """
    scores = reward.score(texts, rows)
    if not isinstance(scores, Scores):
        raise UserError(f"{reward} returned {scores!r:.60} for {len(texts)} samples; return `rlflow.Scores`")
    if taken := next((name for name in scores.parts if name in TAKEN), None):
        raise UserError(
            f"{reward} has a part `{taken}`, and another number is logged under this name; give the part a name other"
            f" than {', '.join(TAKEN)}"
        )
    if scores.left_out and not reward.leaves_out:
        raise UserError(
            f"{reward} leaves out {len(scores.left_out)} samples, and its property `leaves_out` is False, so that"
            " training is not told; let it return True"
        )
    if wrong := [i for i in scores.left_out if i not in range(len(texts))]:
        raise UserError(f"{reward} leaves out sample {wrong[0]} of {len(texts)}; give places from 0")
    for name, values in {"total": scores.total, **scores.parts}.items():
        if len(values) != len(texts):
            raise UserError(
                f"{reward} returned {len(values)} scores as `{name}` for {len(texts)} samples; return one for each"
            )
        for i, value in enumerate(values):
            try:
                _number(value)
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"{reward} failed on sample {i} (`{name}`): {error} ({_place(texts[i], rows[i])}); mend it"
                ) from error
    return scores


class SampleReward(Reward):
    """A reward that looks at one sample at a time. It has no time limit on a sample, but where a subclass gives one.

    Args:
        on_error: What a sample gets whose scorer raises or returns no finite number: `raise` stops the run and names
            the sample, `zero` scores it 0 and counts it; `mask` does so too and takes it out of the losses that depend
            on the score; `skip` does so too and leaves out each update that the sample would be in, on all ranks. What
            compares samples sees the 0, such as the mean of a group.
        at_once: Samples that are scored side by side, in threads; for what waits for others.
    """

    def __init__(self, on_error: OnError = "raise", at_once: int = 1) -> None:
        if at_once < 1:
            raise UserError(f"`at_once` is {at_once}; score 1 sample at a time or more")
        self.on_error = known_policy(on_error)
        self.at_once = at_once

    @property
    def leaves_out(self) -> bool:
        return self.on_error in get_args(LeftOut)

    @abstractmethod
    def score_sample(self, text: str, row: dict[str, Any]) -> float | Mapping[str, float]:
        """The score of one response; or its parts by name, the same for each response, whose sum is the score."""

    def score(self, texts: Sequence[str], rows: Sequence[dict[str, Any]]) -> Scores:
        scores, failures = list[_Score | None](), []
        for i, (text, row, score_of) in enumerate(zip(texts, rows, self._begun(texts, rows), strict=True)):
            try:
                scores.append(_Score.of(score_of()))
            except (UserError, *ENDING):
                raise  # the row, the configuration or whoever ends the run is at fault, not the response
            except BaseException as error:  # such as `asyncio.CancelledError`
                reason = f"{type(error).__name__}: {text_without_secrets(one_line(error)):.{MOST_SAID}}"
                failure = f"{self} failed on sample {i} with {reason} ({_place(text, row)})"
                if self.on_error == "raise":
                    raise UserError(f"{failure}; mend it, or set `on_error: zero`") from error
                scores.append(None)
                failures.append(failure)
        if failures:
            log.warning("%d of %d samples were %s; %s", len(failures), len(texts), DONE[self.on_error], failures[0])
        names = self._names(scores, texts, rows)
        parts = {name: [0.0 if score is None else score.parts[name] for score in scores] for name in names}
        total = [0.0 if score is None else score.total for score in scores]
        failed = [i for i, score in enumerate(scores) if score is None]
        return Scores(total, parts, len(failures), left_out(self.on_error, failed))

    def _begun(
        self, texts: Sequence[str], rows: Sequence[dict[str, Any]]
    ) -> Iterator[Callable[[], float | Mapping[str, float]]]:
        """What gives each sample's score, or raises; with threads, as soon as it is there."""
        if self.at_once == 1:
            yield from (partial(self.score_sample, text, row) for text, row in zip(texts, rows, strict=True))
            return
        with ThreadPoolExecutor(self.at_once) as threads:
            begun = [threads.submit(self.score_sample, text, row) for text, row in zip(texts, rows, strict=True)]
            try:
                yield from (future.result for future in begun)
            finally:
                threads.shutdown(cancel_futures=True)

    def _names(
        self, scores: Sequence[_Score | None], texts: Sequence[str], rows: Sequence[dict[str, Any]]
    ) -> tuple[str, ...]:
        """The names of the parts, which all samples have that were scored."""
        first: tuple[str, ...] | None = None
        for i, score in enumerate(scores):
            if score is None:
                continue
            first = tuple(score.parts) if first is None else first
            if other := sorted(set(first) ^ score.parts.keys()):
                without = [part for part in other if part not in score.parts]
                raise UserError(
                    f"{self} gave sample {i} {'no' if without else 'a'} part `{(without or other)[0]}`, unlike the"
                    f" samples before ({_place(texts[i], rows[i])}); return the same parts for every response"
                )
        return first or ()


@dataclass(frozen=True)
class _Score:
    """Of one sample."""

    total: float
    parts: dict[str, float]

    @classmethod
    def of(cls, given: Any) -> _Score:
        """What a scorer returned, as numbers of float32."""
        if not isinstance(given, Mapping):
            return cls(_number(given), {})
        parts = {}
        for name, value in given.items():
            try:
                parts[str(name)] = _number(value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"part `{name}`: {error}") from error
        return cls(_number(sum(parts.values())), parts)


def known_policy(on_error: OnError) -> OnError:
    """`on_error`, which is one.

    Raises:
        UserError: It is none.
    """
    if on_error not in get_args(OnError):
        *others, last = get_args(OnError)
        raise UserError(f"`on_error` is {on_error!r}; give {', '.join(others)} or {last}")
    return on_error


def left_out(on_error: OnError, failed: Iterable[int]) -> dict[int, LeftOut]:
    """What training leaves out of the samples at these places, which the scorer failed on."""
    return {i: on_error for i in failed if on_error == "mask" or on_error == "skip"}


def column(row: dict[str, Any], name: str) -> Any:
    """The row's column; dots step into it, as in `metadata.expression`.

    Raises:
        UserError: The row has no such column.
    """
    if name in row:
        return row[name]
    value: Any = row
    for step in name.split("."):
        if not isinstance(value, dict) or step not in value:
            found = ", ".join(row)
            raise UserError(
                f"the reward reads column `{name}`, which the dataset's row lacks; columns found: {found}."
                f"{did_you_mean(name, row)} Mend the row, or remove it: {row!r:.120}"
            )
        value = value[step]
    return value


def filled(row: dict[str, Any], name: str) -> Any:
    """The row's column, as of `column`, which is not null.

    Raises:
        UserError: The row has no such column, or null in it.
    """
    value = column(row, name)
    if value is None:
        raise UserError(
            f"the reward reads column `{name}`, which is null in a row of the dataset, so no response could be right;"
            f" write its value, or remove the row: {row!r:.120}"
        )
    return value


def _number(score: Any) -> float:
    """As training reads it: a float32."""
    if not isinstance(score, numbers.Real):
        raise TypeError(f"it returned {score!r:.60}, not a number")
    try:
        value = float(score)
    except OverflowError:  # of an integer
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"it returned {value}")
    if abs(value) > LARGEST:
        raise ValueError(f"it returned {value}, which float32 cannot hold")
    return value


def _place(text: str, row: dict[str, Any]) -> str:
    return f"response {text[:60]!r}, row {row!r:.120}"
