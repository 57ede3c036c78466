"""An agent of smolagents with a calculator; `agent_smolagents.yaml` trains the policy that it calls."""

from __future__ import annotations

from typing import Any

from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def solve(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Answer the question of a row; returns 1 for the right answer, else 0."""
    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key, max_tokens=200)
    agent = ToolCallingAgent([add], model, max_steps=4, verbosity_level=LogLevel.OFF)
    return float(str(agent.run(row["question"])) == row["answer"])
