"""Environments of other packages' forms: Gymnasium's with texts, and SkyRL-Gym's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from rlflow.dotted_path import object_at
from rlflow.errors import UserError


class TextGym:
    """An environment of Gymnasium's form, whose observations and actions are texts.

    `reset` is given the row's column `seed` as `seed`, and the row as `options`, where it takes them; it returns an
    observation, or one and a mapping. `step(action)` returns observation, reward, terminated, truncated, info.

    Args:
        gym: Dotted path of the class, or of a function that makes one.
        options: That it is made with.
    """

    def __init__(self, gym: str, options: Mapping[str, Any] | None = None) -> None:
        self._gym = object_at(gym, f"`gym` is {gym!r}")(**(options or {}))

    def reset(self, **row: Any) -> None:
        given = {"seed": row.get("seed"), "options": row}
        parameters = inspect.signature(self._gym.reset).parameters
        found = self._gym.reset(**{name: value for name, value in given.items() if name in parameters})
        self._first = found[0] if isinstance(found, tuple) else found

    def initial_observation(self) -> str:
        return str(self._first)

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        observation, reward, terminated, truncated, _ = self._gym.step(message["content"])
        over = bool(terminated or truncated)
        return {"reward": float(reward), "episode_done": over, "next_messages": None if over else str(observation)}


class SkyRLGym:
    """An environment of SkyRL-Gym's form: `init(prompt)`, `step(text) -> {observations, reward, done, metadata}`.

    It is made with `env_config` and, as `extras`, the row of the dataset.

    Args:
        gym: Dotted path of the class, such as `skyrl_gym.envs.gsm8k.multi_turn_env.GSM8kMultiTurnEnv`.
        config: As `env_config`.
        prompt: The column of the dataset that has the messages of the prompt.
    """

    def __init__(self, gym: str, config: Mapping[str, Any] | None = None, prompt: str = "prompt") -> None:
        self._class = object_at(gym, f"`gym` is {gym!r}")
        self._config = dict(config or {})
        self._prompt = prompt

    def reset(self, **row: Any) -> None:
        self._gym = self._class(env_config=self._config, extras=row)
        prompt = row.get(self._prompt, [])
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages, _ = self._gym.init(prompt)
        if messages[: len(prompt)] != prompt:
            raise UserError(
                f"{self._class.__name__}.init changed the prompt, which the dataset gave; let it add messages alone"
            )
        self._added: list[dict[str, Any]] = messages[len(prompt) :]

    def initial_observation(self) -> list[dict[str, Any]]:
        return self._added

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        found = self._gym.step(message["content"])
        done = bool(found["done"])
        said = None if done else list(found["observations"])
        return {"reward": float(found["reward"]), "episode_done": done, "next_messages": said}
