"""Scores from a server."""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rlflow.errors import UserError, one_line
from rlflow.rewards.calls import RewardCalls
from rlflow.rewards.reward import EarlyReward, OnError, Reward, RewardInput, Scores, read_column

if TYPE_CHECKING:  # else imported where it is used: `rlflow fit --help` would wait for it
    import httpx

AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}  # status codes of failures that may pass
LONGEST_WAIT_S = 60.0


@dataclass(eq=False)
class Endpoint:
    """A server that answers JSON; a request is repeated when it fails for the moment.

    Between tries it waits 1, 2, 4, ... seconds, by chance up to a half longer or shorter, so that ranks do not all
    retry at the same time; or what the server says in `Retry-After`; a minute at most.

    Args:
        url: URL to post to.
        timeout_s: Time limit of a try.
        retries: Tries after the first one.
        headers: Headers of each request.
    """

    url: str
    timeout_s: float
    retries: int
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"`url` is {self.url!r}; give one that begins with http:// or https://")
        if not self.timeout_s > 0:
            raise UserError(f"`timeout_s` is {self.timeout_s:g}; give more than 0")
        if self.retries < 0:
            raise UserError(f"`retries` is {self.retries}; give 0 or more")
        self._chance = random.Random()  # of its own: what others draw does not depend on tries

    def post(self, body: Any) -> Any:
        """The answer to `body`.

        Raises:
            httpx.HTTPError: The last try failed too.
            ValueError: The answer is not JSON, or nests too deep.
        """
        import httpx

        for attempt in range(self.retries + 1):
            wait = min(LONGEST_WAIT_S, 2.0**attempt * self._chance.uniform(0.5, 1.5))
            try:
                return json.loads(self._answer(body))
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in AGAIN or attempt == self.retries:
                    raise
                wait = _asked_for(error.response, wait)
            except httpx.TransportError:
                if attempt == self.retries:
                    raise
            except RecursionError as error:
                raise ValueError("the answer nests too deep") from error
            time.sleep(wait)
        raise AssertionError("unreachable")

    def _answer(self, body: Any) -> bytes:
        """The answer of one try, which ends in time even if the server sends only a letter now and then."""
        import httpx

        ends, parts = time.monotonic() + self.timeout_s, list[bytes]()
        with httpx.stream("POST", self.url, json=body, headers=self.headers, timeout=self.timeout_s) as response:
            response.raise_for_status()
            for part in response.iter_bytes():
                parts.append(part)
                if time.monotonic() > ends:
                    raise httpx.ReadTimeout(f"the answer took longer than {self.timeout_s:g} s")
        return b"".join(parts)


class HTTPReward(Reward):
    """The score that a server returns for responses.

    The request is `{"texts": [...], "rows": [...]}`. The server's response is `{"scores": [...]}`: for each text a
    number, or a mapping of names to numbers whose sum is the score.

    Args:
        url: URL to which requests are posted.
        batch: Maximum number of samples in one request: consecutive samples of a rank. A request is sent when these
            have ended, while others are generated. None for one request with all samples of a rank, after the last one
            has ended.
        max_concurrent: Maximum number of requests of each rank that are in progress at the same time.
        timeout_s: Time limit of a request.
        retries: Number of further tries if the server cannot be reached, is busy (408, 409, 425, 429) or fails (500,
            502, 503, 504).
        columns: Columns of the row that are sent; None for all.
        headers: Headers of each request. A value `$NAME` is read from the environment variable; use it for secrets.
        on_error: Treatment of a sample for which the server gives no score, see `Reward`. If a request fails, this
            holds for all of its samples.
    """

    def __init__(
        self,
        url: str,
        batch: int | None = None,
        max_concurrent: int = 4,
        timeout_s: float = 60.0,
        retries: int = 5,
        columns: list[str] | None = None,
        headers: dict[str, str] | None = None,
        on_error: OnError = "raise",
    ) -> None:
        super().__init__(on_error)
        if batch is not None and batch < 1:
            raise UserError(f"`batch` is {batch}; send 1 sample or more at a time")
        if max_concurrent < 1:
            raise UserError(f"`max_concurrent` is {max_concurrent}; send 1 request at a time or more")
        self._endpoint = Endpoint(url, timeout_s, retries, with_environment(headers))
        self._batch = batch
        self._max_concurrent = max_concurrent
        self._columns = columns
        self.reads = dict.fromkeys(columns or (), True)

    def scored_early(self) -> list[EarlyReward]:
        if self._batch is None or type(self).score is not HTTPReward.score:
            return []
        return [
            EarlyReward(self, self._max_concurrent, self._batch, lambda of: partial(self._answer, of.texts, of.rows))
        ]

    def score(self, responses: RewardInput) -> Scores:
        texts, rows = responses.texts, responses.rows
        size = self._batch or max(1, len(texts))
        starts = range(0, len(texts), size)
        with responses.begun(self, responses) or RewardCalls(self._max_concurrent) as calls:
            asked = [partial(self._answer, texts[at : at + size], rows[at : at + size]) for at in starts]
            answers = [calls.begin(responses.place(at), ask) for at, ask in zip(starts, asked, strict=True)]

            def score_of(place: int) -> Any:
                return answers[place // size].result()[place % size]

            return self.scores_of((partial(score_of, place) for place in range(len(texts))), responses)

    def _answer(self, texts: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[Any]:
        """The server's answer for each sample.

        Raises:
            ConnectionError: It gives no answer, or another one.
        """
        import httpx

        names = self._columns
        sent = [
            row if names is None else {name: read_column(row, name, may_be_null=True) for name in names} for row in rows
        ]
        try:
            answer = self._endpoint.post({"texts": list(texts), "rows": sent})
        except (httpx.HTTPError, TypeError, ValueError) as error:  # TypeError for an answer that is not JSON
            raise ConnectionError(f"got no answer ({type(error).__name__}: {one_line(error)})") from error
        scores = answer.get("scores") if isinstance(answer, Mapping) else None
        if not isinstance(scores, list) or len(scores) != len(texts):
            raise ConnectionError(
                f'was answered {answer!r:.80} for {len(texts)} texts; answer {{"scores": [a number for each]}}'
            )
        return scores

    def __str__(self) -> str:
        return f"reward of {self._endpoint.url}"


def with_environment(headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers, with a value `$NAME` read from the environment.

    Raises:
        UserError: There is no such variable.
    """

    def value(match: re.Match[str]) -> str:
        if match.group(1) not in os.environ:
            raise UserError(f"`headers` name ${match.group(1)}, and there is no such environment variable; set it")
        return os.environ[match.group(1)]

    return {name: re.sub(r"\$(\w+)", value, text) for name, text in (headers or {}).items()}


def _asked_for(response: httpx.Response, otherwise: float) -> float:
    """The seconds of `Retry-After`, if they are given as a number."""
    try:
        return min(LONGEST_WAIT_S, max(0.0, float(response.headers["Retry-After"])))
    except (KeyError, ValueError):
        return otherwise
