"""Agents that call the policy as their users would: by the `openai` and `anthropic` clients, or by HTTP alone."""

from __future__ import annotations

from typing import Any

MODEL = "policy"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def talks(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Three turns, each after the others."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [user(row["question"])]
    for turn in range(3):
        answer = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6)
        messages += [answer.choices[0].message.model_dump(), user(f"and {turn}?")]
    return float(len(messages))
