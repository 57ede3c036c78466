"""An agent that owns its loop: a program for OpenAI's API with a calculator, which knows nothing of rlflow.

`agent_harness.yaml` trains the policy that it calls.
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

NUMBER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}}


async def solve(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Answer the question of a row; returns 1 for the right answer, else 0."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": row["question"]}]
    for _ in range(6):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD], max_tokens=80)
        said = answer.choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return float(said.content == row["answer"])
        for call in said.tool_calls:
            given = json.loads(call.function.arguments)
            result = str(given["a"] + given["b"]) if {"a", "b"} <= given.keys() else "give a and b"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0
