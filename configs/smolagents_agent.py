"""Agents of smolagents with a calculator; `agent_smolagents.yaml` trains the policy that they call."""

from __future__ import annotations

from typing import Any

from smolagents import CodeAgent, LogLevel, Model, MultiStepAgent, OpenAIServerModel, ToolCallingAgent, tool


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
    return float(str(tool_calling(_policy(base_url, api_key)).run(row["question"])) == row["answer"])


def solve_by_code(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """The same by Python, which smolagents runs."""
    return float(str(coding(_policy(base_url, api_key)).run(row["question"])) == row["answer"])


def tool_calling(model: Model) -> MultiStepAgent:
    """An agent that calls tools."""
    return ToolCallingAgent([add], model, max_steps=3, verbosity_level=LogLevel.OFF)


def coding(model: Model) -> MultiStepAgent:
    """An agent that writes code."""
    return CodeAgent([add], model, max_steps=3, verbosity_level=LogLevel.OFF)


def _policy(base_url: str, api_key: str) -> Model:
    return OpenAIServerModel("policy", api_base=base_url, api_key=api_key, max_tokens=80)
