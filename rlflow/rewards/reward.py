"""What scores responses: the interface, and the policy for scorers that fail."""

from __future__ import annotations

import math
import numbers
import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from rlflow.errors import ENDING, UserError, one_line
from rlflow.loggers.log_lines import line_log

LeftOut = Literal["mask", "skip"]
Failed = Literal["zero", "mask", "skip"]
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
        failed: What samples that the scorer failed on get, by place: what failed counts 0 (`zero`), the whole sample
            counts 0 and is taken out of the loss (`mask`), or each update that it is in is left out (`skip`). The last
            two are for a reward that `leaves_out`.
    """

    total: list[float]
    parts: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)

    @property
    def left_out(self) -> dict[int, LeftOut]:
        """Of those that failed, what training leaves out."""
        return {i: how for i, how in self.failed.items() if how != "zero"}

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

    @property
    def checked_by(self) -> str:
        """Names the code of `check`: what it found of many rows is kept on disk under this name."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    def check(self, row: dict[str, Any]) -> None:  # noqa: B027 - most score whatever stands there
        """Refuse a row that no response could be scored for, though it has all columns of `reads`.

        All rows are looked at before the first step.

        Raises:
            UserError: What is wrong with the row.
        """

    def __str__(self) -> str:
        return type(self).__name__


def scored(reward: Reward, texts: Sequence[str], rows: Sequence[dict[str, Any]]) -> Scores:
    """What `reward` gives, checked: a finite number in float32 for each sample, and each part likewise.

    Those of samples that training leaves out are 0.

    Raises:
        UserError: It raises, or gives another length, or no number; or a part has the name of another metric of
            rewards; or it leaves out what it may not; as `Reward.score`.
    """
    try:
        scores = reward.score(texts, rows)
    except (UserError, *ENDING):
        raise
    except BaseException as error:
        raise UserError(f"{reward} raised {_said(error)}{_raised_at(error)}; mend it") from error
    if not isinstance(scores, Scores):
        raise UserError(f"{reward} returned {scores!r:.60} for {len(texts)} samples; return `rlflow.rewards.Scores`")
    if not isinstance(scores.parts, Mapping):
        raise UserError(f"{reward} returned {scores.parts!r:.60} as parts; return a mapping of names to scores")
    if taken := next((name for name in scores.parts if name in TAKEN), None):
        raise UserError(
            f"{reward} has a part `{taken}`, and another number is logged under this name; give the part a name other"
            f" than {', '.join(TAKEN)}"
        )
    _check_failed(reward, scores.failed, len(texts))
    for name, values in {"total": scores.total, **scores.parts}.items():
        if not isinstance(values, Collection) or len(values) != len(texts):
            count = f"{len(values)} scores" if isinstance(values, Collection) else f"{values!r:.60}"
            raise UserError(f"{reward} returned {count} as `{name}` for {len(texts)} samples; return one for each")
        for i, value in enumerate(values):
            try:
                _number(value)
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"{reward} failed on sample {i} (`{name}`): {error} ({_place(texts[i], rows[i])}); mend it"
                ) from error
    if not (out := scores.left_out):
        return scores
    total, *parts = (
        [0.0 if i in out else x for i, x in enumerate(of)] for of in (scores.total, *scores.parts.values())
    )
    return replace(scores, total=total, parts=dict(zip(scores.parts, parts, strict=True)))


def _check_failed(reward: Reward, failed: Any, samples: int) -> None:
    if not isinstance(failed, Mapping):
        raise UserError(f"{reward} says of samples that failed {failed!r:.60}; give a mapping of places to policies")
    for i, how in failed.items():
        if i not in range(samples):
            raise UserError(f"{reward} failed on sample {i!r:.60} of {samples}; give places from 0")
        if how not in get_args(Failed):
            raise UserError(f"{reward} says {how!r:.60} of sample {i}, which failed; give {_either(Failed)}")
        if how in get_args(LeftOut) and not reward.leaves_out:
            raise UserError(
                f"{reward} leaves out sample {i}, and its property `leaves_out` is False, so that training is not told;"
                " let it return True"
            )


class ForgivingReward(Reward):
    """A reward with a policy for samples that it fails on.

    Args:
        on_error: What a sample gets whose scorer raises or returns no finite number: `raise` stops the run and names
            the sample, `zero` scores it 0 and counts it; `mask` does so too and takes it out of the losses that depend
            on the score; `skip` does so too and leaves out each update that the sample would be in, on all ranks. What
            compares the samples of a group is told of those that `mask` and `skip` leave out.
    """

    def __init__(self, on_error: OnError) -> None:
        if on_error not in get_args(OnError):
            raise UserError(f"`on_error` is {on_error!r}; give {_either(OnError)}")
        self.on_error = on_error

    @property
    def leaves_out(self) -> bool:
        return self.on_error in get_args(LeftOut)

    def scores_of(
        self, given: Iterable[Callable[[], Any]], texts: Sequence[str], rows: Sequence[dict[str, Any]]
    ) -> Scores:
        """The scores of samples, by the policy where there is none.

        Args:
            given: What returns the score of each sample, a number or a mapping of its parts, or raises.
            texts: That are scored.
            rows: That they answer.

        Raises:
            UserError: A sample failed and the policy is `raise`; or one of `given` raises it, for then the row or the
                configuration is at fault; or two samples have other parts, for which of them is wrong is not known.
        """
        scores, failures = list[_Score | None](), list[str]()
        for i, (text, row, score_of) in enumerate(zip(texts, rows, given, strict=True)):
            try:
                scores.append(_Score.of(score_of()))
            except (UserError, *ENDING):
                raise
            except BaseException as error:  # such as `asyncio.CancelledError`
                failure = f"{self} failed on sample {i} with {_said(error)} ({_place(text, row)})"
                if self.on_error == "raise":
                    raise UserError(f"{failure}; mend it, or set `on_error` to {_either(Failed)}") from error
                scores.append(None)
                failures.append(failure)
        if failures:
            log.warning("%d of %d samples were %s; %s", len(failures), len(texts), DONE[self.on_error], failures[0])
        names = self._names(scores, texts, rows)
        parts = {name: [0.0 if score is None else score.parts[name] for score in scores] for name in names}
        total = [0.0 if score is None else score.total for score in scores]
        how = self.on_error
        failed = {i: how for i, score in enumerate(scores) if score is None and how != "raise"}
        return Scores(total, parts, failed)

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


class SampleReward(ForgivingReward):
    """A reward that looks at one sample at a time. It has no time limit on a sample, but where a subclass gives one.

    Args:
        on_error: What a sample gets that it fails on, see `ForgivingReward`.
        at_once: Samples that are scored side by side, in threads; for what waits for others.
    """

    def __init__(self, on_error: OnError = "raise", at_once: int = 1) -> None:
        super().__init__(on_error)
        if at_once < 1:
            raise UserError(f"`at_once` is {at_once}; score 1 sample at a time or more")
        self.at_once = at_once

    @abstractmethod
    def score_sample(self, text: str, row: dict[str, Any]) -> float | Mapping[str, float]:
        """The score of one response; or its parts by name, the same for each response, whose sum is the score."""

    def score(self, texts: Sequence[str], rows: Sequence[dict[str, Any]]) -> Scores:
        if self.at_once == 1:
            pairs = zip(texts, rows, strict=True)
            return self.scores_of((partial(self.score_sample, text, row) for text, row in pairs), texts, rows)
        with side_by_side(self.at_once) as threads:
            begun = [threads.submit(self.score_sample, text, row) for text, row in zip(texts, rows, strict=True)]
            return self.scores_of((future.result for future in begun), texts, rows)


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
        if not given:
            raise ValueError("it returned a mapping without a part")
        parts = {}
        for name, value in given.items():
            try:
                parts[str(name)] = _number(value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"part `{name}`: {error}") from error
        return cls(_number(sum(parts.values())), parts)


@contextmanager
def side_by_side(most: int) -> Iterator[ThreadPoolExecutor]:
    """Threads, so many at most; where one result ends the run, what has not begun is not begun."""
    with ThreadPoolExecutor(most) as threads:
        try:
            yield threads
        finally:
            threads.shutdown(cancel_futures=True)


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


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error):.{MOST_SAID}}"


def _raised_at(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without that of the caller here
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


def _either(policies: Any) -> str:
    *others, last = get_args(policies)
    return f"{', '.join(others)} or {last}"


def _place(text: str, row: dict[str, Any]) -> str:
    return f"response {text[:60]!r}, row {row!r:.120}"
