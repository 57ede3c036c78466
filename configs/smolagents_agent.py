"""Agents of smolagents with a calculator; `agent_smolagents.yaml` trains the policy that they call."""

from __future__ import annotations

from typing import Any

from smolagents import ActionStep, CodeAgent, LogLevel, Model, MultiStepAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def solve(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Answer the question of a row by calls of tools; returns `reward` of the agent's work."""
    return reward(tool_calling(_policy(base_url, api_key)), row)


def solve_by_code(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """The same by Python, which smolagents runs."""
    return reward(coding(_policy(base_url, api_key)), row)


def reward(agent: MultiStepAgent, row: dict[str, Any]) -> float:
    """Half for the right answer, half for the share of steps that the agent could read and run."""
    answer = agent.run(row["question"])
    ran = [step.error is None for step in agent.memory.steps if isinstance(step, ActionStep)]
    return (float(str(answer) == row["answer"]) + sum(ran) / len(ran)) / 2


def tool_calling(model: Model) -> MultiStepAgent:
    """An agent that calls tools."""
    return ToolCallingAgent([add], model, max_steps=3, verbosity_level=LogLevel.OFF)


def coding(model: Model) -> MultiStepAgent:
    """An agent that writes code."""
    return CodeAgent([add], model, max_steps=3, verbosity_level=LogLevel.OFF)


def _policy(base_url: str, api_key: str) -> Model:
    return OpenAIServerModel("policy", api_base=base_url, api_key=api_key, max_tokens=80)
