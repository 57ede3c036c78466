"""An agent of openai-agents with a calculator; `agent_openai_agents.yaml` trains the policy that it calls."""

from __future__ import annotations

from typing import Any

from agents import Agent, AgentsException, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from agents import set_tracing_disabled as disable_tracing
from openai import AsyncOpenAI

disable_tracing(True)  # traces would be sent to OpenAI


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def solve(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Answer the question of a row; returns 1 for the right answer, else 0."""
    agent = Agent(
        name="calculator",
        instructions="Answer with the sum alone.",
        tools=[function_tool(add)],
        model=OpenAIChatCompletionsModel("policy", AsyncOpenAI(base_url=base_url, api_key=api_key)),
        model_settings=ModelSettings(max_tokens=80),
    )
    try:
        result = await Runner.run(agent, row["question"], max_turns=6)
    except AgentsException:  # such as a tool that there is none of, or too many turns
        return 0.0
    return float(result.final_output == row["answer"])
