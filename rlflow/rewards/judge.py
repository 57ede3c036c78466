"""Scores by a language model behind an OpenAI-compatible endpoint: one, or one for each criterion of a rubric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlflow.rewards.http import Endpoint, with_environment
from rlflow.rewards.reward import OnError, RewardInput, SampleReward, Scores
from rlflow.rewards.rubric import PROMPT, Rubric


class Judge(SampleReward):
    """What a language model says of a response, from 0 to 1.

    The model is asked by `POST {url}/chat/completions`, as OpenAI's, vLLM's and most others' servers take it. It grades
    on a scale of whole numbers, which models keep to better than fractions; the score is the share of the scale.

    Args:
        url: Of the server, such as http://localhost:8000/v1.
        model: Its name there.
        criteria: What counts, by name, each in words; a rubric. The score of each is a part of the reward. None for one
            score of the whole.
        weights: Of the criteria, whose weighted mean is the score; None for all alike.
        scale: The best grade; the worst is 0.
        prompt: What the judge is asked. `{response}`, `{criteria}`, `{form}` and columns of the row stand in braces.
        temperature: Of the judge.
        max_tokens: Of its answer.
        headers: Of each request, see `HTTPReward`: `{Authorization: Bearer $OPENAI_API_KEY}`.
        at_once: Requests side by side, of each rank.
        seconds: What a request may take.
        retries: See `HTTPReward`; an answer without grades is asked for again too.
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
        at_once: int = 8,
        seconds: float = 120.0,
        retries: int = 5,
        on_error: OnError = "raise",
    ) -> None:
        super().__init__(on_error, at_once)
        self.rubric = Rubric(criteria, weights, scale, prompt)
        self.model = model
        self._asked = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._tries = retries + 1
        self._endpoint = Endpoint(f"{url.rstrip('/')}/chat/completions", seconds, retries, with_environment(headers))

    @property
    def reads(self) -> dict[str, bool]:
        return dict.fromkeys(self.rubric.columns, True)

    def score_sample(self, text: str, row: dict[str, Any]) -> float | Mapping[str, float]:
        messages = [{"role": "user", "content": self.rubric.question(text, row)}]
        said = ""
        for _ in range(self._tries):
            answer = self._endpoint.post({**self._asked, "messages": messages})
            said = answer["choices"][0]["message"]["content"] or ""
            if shares := self.rubric.shares(said):
                return shares if self.rubric.criteria else shares["score"]
        raise ValueError(f"the judge gave no grades in {self._tries} answers, the last {said[-100:]!r}")

    def score(self, responses: RewardInput) -> Scores:
        scores = super().score(responses)
        if not scores.parts:
            return scores
        shares = [{name: part[i] or 0.0 for name, part in scores.parts.items()} for i in range(len(responses))]
        return replace(scores, total=[self.rubric.score(each) for each in shares])

    def __str__(self) -> str:
        return f"judge {self.model}"
