"""A program that lets the policy play an environment of OpenEnv, a server which it starts: one sum to answer.

It runs where OpenEnv is installed, in its own environment: `build/door/openenv/bin/python`, by `make door-envs`.
"""

import json
import os
import socket
import sys
import threading
from typing import Any

import uvicorn
from openai import OpenAI
from openenv.core import Action, Environment, GenericEnvClient, Observation, State
from openenv.core.env_server import create_fastapi_app


class Guess(Action):
    """Answer of the policy."""

    text: str


class Question(Observation):
    """Question that the policy is asked."""

    text: str = ""


class Sum(Environment):
    """One sum: reward 1 for its answer, else 0."""

    def __init__(self) -> None:
        super().__init__()
        self.row: dict[str, Any] = {}

    def reset(self, seed: int | None = None, episode_id: str | None = None, **row: Any) -> Question:
        self.row = row
        return Question(text=row["question"])

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Question:
        return Question(done=True, reward=float(action.text == self.row["answer"]))

    @property
    def state(self) -> State:
        return State()


def main() -> None:
    """Play an episode; the row is on standard input, and the last line is its reward."""
    row = json.load(sys.stdin)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_fastapi_app(Sum, Guess, Question), log_level="error"))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    policy = OpenAI().chat.completions  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    with GenericEnvClient(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}").sync() as world:
        seen = world.reset(**row)
        while not seen.done:
            asked: Any = [{"role": "user", "content": seen.observation["text"]}]
            said = policy.create(model=os.environ["RLFLOW_MODEL"], messages=asked, max_tokens=80)
            seen = world.step({"text": said.choices[0].message.content})
    print(seen.reward)


if __name__ == "__main__":
    main()
