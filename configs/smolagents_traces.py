"""Requests of the agents in `smolagents_agent.py`, which a script answers; `agent_smolagents_sft.yaml` teaches them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

from rlflow.configs.calculator import Sums


class Traces(Sums):
    """For each sum one request of an agent that is asked for it, and its answer: the columns `prompt` and `response`.

    The script answers as the agent wants it every other time, else by a number that it guesses.

    Args:
        size: Number of sums.
        code: Whether the agent writes code, else it calls tools.
        split: See `Sums`.
    """

    def __init__(self, size: int, code: bool = False, split: Literal["train", "validation"] = "train") -> None:
        super().__init__(size, split=split)
        self.code = code
        self._traces = cache(self._trace)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._traces(row)

    def _trace(self, row: int) -> dict[str, Any]:
        from smolagents import OpenAIServerModel

        from rlflow.configs.smolagents_agent import coding, tool_calling

        found = super().__getitem__(row)
        draws = random.Random(f"script of {found['row']}")
        script = Script(found, draws)
        client = SimpleNamespace(chat=SimpleNamespace(completions=script))
        (coding if self.code else tool_calling)(OpenAIServerModel("script", client=client)).run(found["question"])
        prompt, response = draws.choice(script.turns)
        return {**found, "prompt": prompt, "response": [{"role": "assistant", "content": response}]}


class Script:
    """Answers requests in place of a client for OpenAI's API.

    Attributes:
        turns: The messages of each request, and the answer.
    """

    def __init__(self, row: Mapping[str, Any], draws: random.Random) -> None:
        self.turns: list[tuple[list[dict[str, str]], str]] = []
        self._a, self._b = row["a"], row["b"]
        self._draws = draws

    def create(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **_: Any) -> Any:
        """Answer a request."""
        from openai.types.chat import ChatCompletion

        read = [{"role": each["role"].value, "content": _text(each["content"])} for each in messages]
        seen = read[-1]["content"].rpartition("Observation:\n")[2]
        call = {"name": "add", "arguments": {"a": self._a, "b": self._b}}
        if seen.isdecimal():
            call = {"name": "final_answer", "arguments": {"answer": seen}}
        said, calls = f"<code>\nfinal_answer(add({self._a}, {self._b}))\n</code>", []
        if not seen.isdecimal() and self._draws.random() < 0.5:
            said = str(self._draws.randint(2, 18))
        elif tools:
            said = f"<tool_call>{json.dumps(call)}</tool_call>"
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            calls = [{"id": "1", "type": "function", "function": function}]
        self.turns.append((read, said))
        message = {"role": "assistant", "content": None if calls else said, "tool_calls": calls or None}
        answer = {"id": "", "object": "chat.completion", "created": 0, "model": ""}
        answer["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]
        answer["usage"] = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
        return ChatCompletion.model_validate(answer)


def final_answer(answer: str) -> str:
    """End the task: the tool that smolagents adds to those of its agent.

    Args:
        answer: The answer.
    """
    return answer


def _text(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
