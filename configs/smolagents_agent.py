"""Agents of smolagents with a calculator, and traces of them.

`agent_smolagents_sft.yaml` teaches a model the traces, and `agent_smolagents.yaml` trains it through the agent.
"""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

from openai.types.chat import ChatCompletion
from smolagents import CodeAgent, LogLevel, MultiStepAgent, OpenAIServerModel, ToolCallingAgent, tool

from rlflow.configs.calculator import Sums


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def solve(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Answer the question of a row by calls of tools; returns 1 for the right answer, else 0."""
    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key, max_tokens=80)
    return _reward(ToolCallingAgent([add], model, max_steps=3, verbosity_level=LogLevel.OFF), row)


def solve_by_code(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """The same by Python, which smolagents runs."""
    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key, max_tokens=80)
    return _reward(CodeAgent([add], model, max_steps=3, verbosity_level=LogLevel.OFF), row)


def final_answer(answer: str) -> str:
    """The tool that smolagents adds: the traces are written with it and `add` as tools.

    Args:
        answer: The answer.
    """
    return answer


def _reward(agent: MultiStepAgent, row: dict[str, Any]) -> float:
    return float(str(agent.run(row["question"])) == row["answer"])


class Traces(Sums):
    """For each sum a request of the agent, as the columns `prompt` and `response`, where a script answers it.

    The script writes a step as the agent wants it every other time, else a number that it guesses.

    Args:
        size: How many.
        code: Whether the agent is a `CodeAgent`, else a `ToolCallingAgent`.
        split: See `Sums`.
    """

    def __init__(self, size: int, code: bool = False, split: Any = "train") -> None:
        super().__init__(size, split=split)
        self.code = code

    def __getitem__(self, row: int) -> dict[str, Any]:
        found = super().__getitem__(row)
        draws = random.Random(f"script of {found['row']}")
        script = _Script(found, draws)
        agent = (CodeAgent if self.code else ToolCallingAgent)([add], script, max_steps=3, verbosity_level=LogLevel.OFF)
        agent.run(found["question"])
        prompt, response = draws.choice(script.turns)
        return {**found, "prompt": prompt, "response": [{"role": "assistant", "content": response}]}


class _Script(OpenAIServerModel):
    """Answers in the place of a server.

    Attributes:
        turns: The messages of each request, and the answer.
    """

    def __init__(self, row: dict[str, Any], draws: random.Random) -> None:
        super().__init__("script")
        self.turns: list[tuple[list[dict[str, Any]], str]] = []
        self._row = row
        self._draws = draws

    def create_client(self) -> Any:
        return SimpleNamespace(chat=SimpleNamespace(completions=self))

    def create(self, messages: list[dict[str, Any]], tools: Any = None, **_: Any) -> ChatCompletion:
        read = [{"role": each["role"].value, "content": _text(each["content"])} for each in messages]
        seen = read[-1]["content"].rpartition("Observation:\n")[2]
        a, b = self._row["a"], self._row["b"]
        guesses = self._draws.random() < 0.5 and not seen.isdecimal()
        call = {"name": "add", "arguments": {"a": a, "b": b}}
        if seen.isdecimal():
            call = {"name": "final_answer", "arguments": {"answer": seen}}
        said = str(self._draws.randint(2, 18)) if guesses else f"<code>\nfinal_answer(add({a}, {b}))\n</code>"
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if tools and not guesses:
            said = f"<tool_call>{json.dumps(call)}</tool_call>"
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            message |= {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
        self.turns.append((read, said))
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
        return ChatCompletion.model_validate(
            {"id": "", "object": "chat.completion", "created": 0, "model": "", "choices": [choice], "usage": usage}
        )


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
