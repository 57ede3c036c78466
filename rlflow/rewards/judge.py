"""Scores by a language model: the question about a response, how grades are read, and a judge behind an endpoint."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlflow.errors import UserError, did_you_mean
from rlflow.rewards.http import Endpoint, with_environment
from rlflow.rewards.reward import OnError, RewardInput, SampleReward, Scores

PROMPT = """You grade an answer to a task.

Task:
{question}

Answer:
{response}
{criteria}
Say in a sentence or two what is right and wrong about it. Then give JSON on the last line, with nothing after it:
{form}"""

_FIELD = re.compile(r"\{(\w+)\}")


class Judge(SampleReward):
    """The score that a language model gives a response, from 0 to 1.

    The request is `POST {url}/chat/completions`, which the servers of OpenAI, vLLM and most others take. The model
    grades in whole numbers from 0 to `scale`, since models use them more reliably than fractions. The score is the
    grade divided by `scale`.

    Args:
        url: URL of the server, such as http://localhost:8000/v1.
        model: Name of the model on the server.
        criteria: Criteria of a rubric: by name, a text that describes the criterion. The score of each criterion is a
            part of the reward. None for one score of the whole response.
        weights: Weights of the criteria. The score is the weighted mean of their scores. None for equal weights.
        scale: Best grade; the worst is 0.
        prompt: Prompt of the judge. `{response}`, `{criteria}`, `{form}` and columns of the row are in braces.
        temperature: Temperature of the judge.
        max_tokens: Longest answer of the judge, in tokens.
        headers: Headers of each request, see `HTTPReward`: `{Authorization: Bearer $OPENAI_API_KEY}`.
        max_concurrent: Maximum number of requests of each rank that are in progress at the same time.
        timeout_s: Time limit of a request.
        retries: Number of further tries, see `HTTPReward`. They are also made if an answer has no grades.
        on_error: `raise`, `zero` or `drop`; see `Reward`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        criteria: dict[str, str] | None = None,
        weights: dict[str, float] | None = None,
        scale: int = 10,
        prompt: str = PROMPT,
        temperature: float = 0.0,
        max_tokens: int = 512,
        headers: dict[str, str] | None = None,
        max_concurrent: int = 8,
        timeout_s: float = 120.0,
        retries: int = 5,
        on_error: OnError = "raise",
    ) -> None:
        super().__init__(on_error, max_concurrent)
        self.rubric = Rubric(criteria, weights, scale, prompt)
        self.reads = dict.fromkeys(self.rubric.columns, True)
        self.model = model
        self._asked = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._tries = retries + 1
        self._endpoint = Endpoint(f"{url.rstrip('/')}/chat/completions", timeout_s, retries, with_environment(headers))

    @property
    def waits_for_others(self) -> bool:
        return True

    def score_sample(self, text: str, row: dict[str, Any]) -> float | Mapping[str, float]:
        messages = [{"role": "user", "content": self.rubric.question(text, row)}]
        content = ""
        for _ in range(self._tries):
            answer = self._endpoint.post({**self._asked, "messages": messages})
            content = answer["choices"][0]["message"]["content"] or ""
            if shares := self.rubric.shares(content):
                return shares if self.rubric.criteria else shares["score"]
        raise ValueError(f"the judge gave no grades in {self._tries} answers, the last {content[-100:]!r}")

    def score(self, responses: RewardInput) -> Scores:
        scores = super().score(responses)
        if not scores.parts:
            return scores
        shares = [{name: part[i] or 0.0 for name, part in scores.parts.items()} for i in range(len(responses))]
        return replace(scores, total=[self.rubric.score(each) for each in shares])

    def __str__(self) -> str:
        return f"judge {self.model}"


class Rubric:
    """Grades of a judge, in whole numbers from 0 to `scale`. A score is the grade divided by `scale`.

    Args:
        criteria: Criteria: by name, a text that describes the criterion. None for one grade of the whole response.
        weights: Weights of the criteria. The score is the weighted mean of their scores. None for equal weights.
        scale: Best grade; the worst is 0.
        prompt: Prompt of the judge. `{response}`, `{criteria}`, `{form}` and columns of the row are in braces.
    """

    def __init__(
        self,
        criteria: dict[str, str] | None = None,
        weights: dict[str, float] | None = None,
        scale: int = 10,
        prompt: str = PROMPT,
    ) -> None:
        self.criteria = criteria or {}
        self.weights = weights or dict.fromkeys(self.criteria, 1.0)
        if self.weights.keys() != self.criteria.keys():
            other = sorted(self.weights.keys() ^ self.criteria.keys())[0]
            raise UserError(f"`criteria` and `weights` name different things, `{other}` in one alone; name the same")
        if self.criteria and not sum(self.weights.values()) > 0:
            raise UserError(f"`weights` are {self.weights}, whose sum is not above 0; give positive ones")
        if scale < 1:
            raise UserError(f"`scale` is {scale}; give the best grade, 1 or more")
        if "{response}" not in prompt:
            raise UserError("`prompt` does not say where the response goes; write {response} in it")
        self.scale = scale
        self.prompt = prompt

    @property
    def names(self) -> list[str]:
        """Names of the grades."""
        return list(self.criteria) or ["score"]

    @property
    def columns(self) -> list[str]:
        """Columns of the row that the prompt names."""
        return [name for name in _FIELD.findall(self.prompt) if name not in ("response", "form", "criteria")]

    def question(self, text: str, row: Mapping[str, Any]) -> str:
        """The judge's question about a response to this row of the dataset.

        Raises:
            UserError: The row lacks a column that the prompt names.
        """
        form = json.dumps(dict.fromkeys(self.names, f"0 to {self.scale}"))
        listed = "".join(f"- {name}: {words}\n" for name, words in self.criteria.items())
        given = {"response": text, "form": form, "criteria": f"\nWhat counts:\n{listed}" if listed else ""}

        def value(match: re.Match[str]) -> str:
            name = match.group(1)
            if name not in given and name not in row:
                raise UserError(
                    f"`prompt` names {{{name}}}, and the row has no such column (it has {', '.join(row)})."
                    f"{did_you_mean(name, row)}"
                )
            return given[name] if name in given else str(row[name])

        return _FIELD.sub(value, self.prompt)

    def shares(self, answer: str) -> dict[str, float]:
        """The grades in a judge's answer, by name, from 0 to 1; none where one is missing or out of the scale."""
        return {name: grade / self.scale for name, grade in grades_in(answer, self.names, self.scale).items()}

    def score(self, shares: Mapping[str, float]) -> float:
        """The weighted mean of the shares."""
        if not self.criteria:
            return shares["score"]
        whole = sum(self.weights.values())
        return sum(self.weights[name] / whole * share for name, share in shares.items())


def grades_in(answer: str, names: list[str], scale: int) -> dict[str, float]:
    """The grades of all names in the last JSON object of a text; none where one is missing or out of the scale.

    Where objects are within one another, the outermost counts that has all names.
    """
    last, around = -1, []
    for start in reversed([match.start() for match in re.finditer(r"\{", answer)]):
        try:
            found, end = json.JSONDecoder().raw_decode(answer, start)
        except ValueError:
            continue
        except RecursionError:
            break
        last = start if last < 0 else last
        if end > last:
            around.append(found)
    for found in reversed(around):
        if all(name in found for name in names):
            grades = {name: _number(found[name]) for name in names}
            return grades if all(0 <= grade <= scale for grade in grades.values()) else {}
    return {}


def _number(value: Any) -> float:
    """The grade as a number; NaN, which is in no scale, if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
