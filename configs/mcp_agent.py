"""An agent whose tools are those of an MCP server; `agent_mcp.yaml` trains the policy that it calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters
from openai import AsyncOpenAI

SERVER = StdioServerParameters(command=sys.executable, args=[str(Path(__file__).with_name("calculator_server.py"))])


async def solve(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Answer the question of a row; returns 1 for the right answer, else 0."""
    chat = AsyncOpenAI(base_url=base_url, api_key=api_key).chat.completions
    messages: list[Any] = [{"role": "user", "content": row["question"]}]
    async with Client(SERVER) as server:
        tools: list[Any] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in (await server.list_tools()).tools
        ]
        for _ in range(6):
            answer = await chat.create(model="policy", messages=messages, tools=tools, max_tokens=80)
            said: Any = answer.choices[0].message
            messages.append(said)
            if not said.tool_calls:
                return float(said.content == row["answer"])
            for call in said.tool_calls:
                result: Any = await server.call_tool(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result.content[0].text})
    return 0.0
