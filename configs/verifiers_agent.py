"""A program in which the policy does a task of verifiers, one sum to answer; the reward is the task's.

It runs where verifiers is installed, in its own environment: `build/door/verifiers/bin/python`, by `make door-envs`.
"""

import asyncio
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI


class SumData(vf.TaskData):
    """A sum with its answer."""

    answer: str


class Sum(vf.Task[SumData]):
    """Reward 1 for the right answer, else 0."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Ask(vf.Harness[vf.HarnessConfig]):
    """One call of the policy, in this process; verifiers records it on its way to the door."""

    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        policy = AsyncOpenAI(base_url=endpoint, api_key=secret).chat.completions
        asked: Any = [{"role": "user", "content": data.prompt}]
        await policy.create(model=ctx.model, messages=asked, max_tokens=80)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def main() -> None:
    """Play an episode; the row is on standard input, and the last line is its reward."""
    row = json.load(sys.stdin)
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    config = vf.AgentConfig(model=os.environ["RLFLOW_MODEL"], client=client, runtime=vf.SubprocessConfig())
    agent = vf.Agent(config)
    agent.harness = Ask(vf.HarnessConfig(id="ask"))  # by name it would have to be an installed package
    trace = await agent.run(Sum(SumData(prompt=row["question"], answer=row["answer"])))
    print(trace.reward)


if __name__ == "__main__":
    asyncio.run(main())
