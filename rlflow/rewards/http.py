"""Scores that a server gives."""

from __future__ import annotations

import math
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import httpx

from rlflow.errors import UserError, one_line
from rlflow.loggers.log_lines import line_log
from rlflow.rewards.reward import DONE, LeftOut, OnError, Reward, Scores, column, known_policy, left_out

AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}  # the codes of what may go well another time
LONGEST_WAIT_S = 60.0

log = line_log(__name__)


class Endpoint:
    """A server that answers JSON, asked again where it fails for the moment.

    Between tries it waits 1, 2, 4, ... seconds, by chance up to a half longer or shorter so that ranks do not come at
    once; or what the server says in `Retry-After`; a minute at most.

    Args:
        url: Where to post.
        seconds: What a try may take.
        retries: Tries after the first one.
        headers: Of each request.
    """

    def __init__(self, url: str, seconds: float, retries: int, headers: Mapping[str, str] | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"`url` is {url!r}; give one that begins with http:// or https://")
        if not seconds > 0:
            raise UserError(f"`seconds` is {seconds:g}; give more than 0")
        if retries < 0:
            raise UserError(f"`retries` is {retries}; give 0 or more")
        self.url = url
        self._seconds = seconds
        self._retries = retries
        self._headers = dict(headers or {})
        self._chance = random.Random()  # of its own: what others draw does not depend on tries

    def post(self, body: Any) -> Any:
        """The answer to `body`.

        Raises:
            httpx.HTTPError: The last try failed too.
            ValueError: The answer is no JSON.
        """
        for attempt in range(self._retries + 1):
            wait = min(LONGEST_WAIT_S, 2.0**attempt * self._chance.uniform(0.5, 1.5))
            try:
                response = httpx.post(self.url, json=body, headers=self._headers, timeout=self._seconds)
                response.raise_for_status()
                return response.json()
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in AGAIN or attempt == self._retries:
                    raise
                wait = _asked_for(error.response, wait)
            except httpx.TransportError:
                if attempt == self._retries:
                    raise
            time.sleep(wait)
        raise AssertionError("unreachable")


class HTTPReward(Reward):
    """What a server says of responses.

    It is sent `{"texts": [...], "rows": [...]}` and answers `{"scores": [...]}`, a number for each text, or a mapping
    of names to numbers whose sum is the score.

    Args:
        url: Where to post.
        batch: Samples of one request at most; None for all of a rank's.
        at_once: Requests side by side, of each rank.
        seconds: What a request may take.
        retries: Tries after the first one, where the server cannot be reached, is busy (408, 409, 425, 429) or fails
            (500, 502, 503, 504).
        columns: Of the row that are sent; None for all.
        headers: Of each request. A value `$NAME` is that of an environment variable, where secrets belong.
        on_error: What samples get whose request failed: `raise` stops the run, `zero` scores them 0 and counts them,
            `mask` and `skip` keep them out of training too; see `SampleReward`.
    """

    def __init__(
        self,
        url: str,
        batch: int | None = None,
        at_once: int = 4,
        seconds: float = 60.0,
        retries: int = 5,
        columns: list[str] | None = None,
        headers: dict[str, str] | None = None,
        on_error: OnError = "raise",
    ) -> None:
        if batch is not None and batch < 1:
            raise UserError(f"`batch` is {batch}; send 1 sample or more at a time")
        if at_once < 1:
            raise UserError(f"`at_once` is {at_once}; send 1 request at a time or more")
        self._endpoint = Endpoint(url, seconds, retries, with_environment(headers))
        self._batch = batch
        self._at_once = at_once
        self._columns = columns
        self._on_error = known_policy(on_error)

    @property
    def leaves_out(self) -> bool:
        return self._on_error in get_args(LeftOut)

    @property
    def reads(self) -> dict[str, bool]:
        return dict.fromkeys(self._columns or (), True)

    def score(self, texts: Sequence[str], rows: Sequence[dict[str, Any]]) -> Scores:
        size = self._batch or max(1, len(texts))
        starts = range(0, len(texts), size)
        with ThreadPoolExecutor(self._at_once) as threads:
            parts = list(threads.map(lambda at: self._scores(texts[at : at + size], rows[at : at + size]), starts))
        failures = [each for each in parts if isinstance(each, str)]
        if failures and self._on_error == "raise":
            raise UserError(f"{self} {failures[0]}; mend the server, or set `on_error: zero`")
        scores = [score for part in parts if not isinstance(part, str) for score in part]
        names = sorted({name for score in scores for name in score} - {""})
        total, columns, failed = list[float](), {name: list[float]() for name in names}, list[int]()
        for at, part in zip(starts, parts, strict=True):
            count = len(texts[at : at + size])
            failed += range(at, at + count) if isinstance(part, str) else ()
            of_part: Sequence[Mapping[str, float]] = [{}] * count if isinstance(part, str) else part
            total += [sum(score.values()) for score in of_part]
            for name in names:
                columns[name] += [score.get(name, 0.0) for score in of_part]
        if failures:
            log.warning(
                "%d of %d samples were %s; %s %s", len(failed), len(texts), DONE[self._on_error], self, failures[0]
            )
        return Scores(total, columns, len(failed), left_out(self._on_error, failed))

    def _scores(self, texts: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[Mapping[str, float]] | str:
        """The parts of each sample's score, the only one under no name; or what failed."""
        names = self._columns
        sent = [row if names is None else {name: column(row, name) for name in names} for row in rows]
        try:
            answer = self._endpoint.post({"texts": list(texts), "rows": sent})
        except (httpx.HTTPError, TypeError, ValueError) as error:  # TypeError of what is no JSON
            return f"got no answer ({type(error).__name__}: {one_line(error)})"
        scores = answer.get("scores") if isinstance(answer, Mapping) else None
        if not isinstance(scores, list) or len(scores) != len(texts):
            return f'was answered {answer!r:.80} for {len(texts)} texts; answer {{"scores": [a number for each]}}'
        parts: list[Mapping[str, float]] = [score if isinstance(score, Mapping) else {"": score} for score in scores]
        wrong = [number for part in parts for number in part.values() if not _is_number(number)]
        return f"was answered the score {wrong[0]!r:.40}; answer finite numbers" if wrong else parts

    def __str__(self) -> str:
        return f"reward of {self._endpoint.url}"


def with_environment(headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers, those of a value `$NAME` from the environment.

    Raises:
        UserError: There is no such variable.
    """

    def value(match: re.Match[str]) -> str:
        if match.group(1) not in os.environ:
            raise UserError(f"`headers` speak of ${match.group(1)}, and there is no such environment variable; set it")
        return os.environ[match.group(1)]

    return {name: re.sub(r"\$(\w+)", value, text) for name, text in (headers or {}).items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _asked_for(response: httpx.Response, otherwise: float) -> float:
    """The seconds of `Retry-After`, where they are given as a number."""
    try:
        return min(LONGEST_WAIT_S, max(0.0, float(response.headers["Retry-After"])))
    except (KeyError, ValueError):
        return otherwise
