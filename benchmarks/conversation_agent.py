"""The same conversation as an agent that owns its loop, and as an environment; workers import it by its path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANSWER = "go on, and say what comes after that"


def talk(row: Mapping[str, Any], base_url: str, api_key: str) -> float:
    """Turns of at most so many tokens, each answered alike; the reward is how many there were."""
    import httpx

    messages: list[Any] = [{"role": "user", "content": row["question"]}]
    headers = {"Authorization": f"Bearer {api_key}"}
    with httpx.Client(base_url=base_url, headers=headers, timeout=600) as client:
        for _ in range(row["turns"]):
            body = {"model": "policy", "messages": messages, "max_tokens": row["tokens"]}
            answer = client.post("/chat/completions", json=body).raise_for_status().json()
            messages += [answer["choices"][0]["message"], {"role": "user", "content": ANSWER}]
    return float(row["turns"])


class Talk:
    """Answers as many turns."""

    def reset(self, turns: int) -> None:
        self.left = turns

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self.left -= 1
        said = [{"role": "user", "content": ANSWER}]
        return {"reward": 1.0, "episode_done": self.left == 0, "next_messages": said}

    def initial_observation(self) -> list[Any]:
        return []
