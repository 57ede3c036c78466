"""Adapters for environments of other packages: Gymnasium's with texts, SkyRL-Gym's, and the games of textarena.

Each has the methods by which a conversation runs an environment: `reset(**row)` with the row of the dataset, then
`initial_observation()`, then `step(message)` for each turn of the policy, in the process of its host.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from threading import Lock
from typing import Any, ClassVar

from rlflow.dotted_path import object_at
from rlflow.environments.host import OwnDraws
from rlflow.errors import UserError, did_you_mean, require
from rlflow.values.path import hashed


class TextGym:
    """An environment of Gymnasium's form, whose observations and actions are texts.

    If its `reset` has a parameter `seed`, it gets the row's column `seed`; a parameter `options` gets the whole row.
    `reset` returns an observation, or an observation and a mapping. `step(action)` returns observation, reward,
    terminated, truncated and info:

        class Guess:
            def reset(self, seed=None):
                return "Guess a number.", {}

            def step(self, action):
                return "higher", 0.0, False, False, {}  # reward 0, and the policy reads "higher"

    Args:
        gym: Dotted path of the class, or of a function that constructs the environment.
        options: Arguments of that class or function.
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

    For each conversation the class is constructed with two arguments: `env_config`, and `extras`, which is the
    dataset's row. `step` gets the text of a turn. Its `observations` are the messages that answer the turn, unless
    `done` is true.

    Args:
        gym: Dotted path of the class, such as `skyrl_gym.envs.gsm8k.multi_turn_env.GSM8kMultiTurnEnv`.
        config: Argument `env_config` of the class.
        prompt: Column of the dataset that has the prompt, a text or messages. `init` may add messages after them, and
            is refused if it changes them.
    """

    def __init__(self, gym: str, config: Mapping[str, Any] | None = None, prompt: str = "prompt") -> None:
        self._class = object_at(gym, f"`gym` is {gym!r}")
        self._config = dict(config or {})
        self._prompt = prompt

    def reset(self, **row: Any) -> None:
        self._gym = self._class(env_config=self._config, extras=row)
        prompt = row.get(self._prompt, [])
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages, _ = self._gym.init(deepcopy(prompt))
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


PLAYER, OPPONENT = "player", "opponent"


class TextArena:
    """A game of textarena, in which each message of the policy is a move.

    Its seats are `player` and `opponent`; with more than two players they are `player`, `opponent_1`, `opponent_2` and
    so on. The column `seed` of the dataset's row seeds the game; if it is not a whole number, a hash of the row does.
    The seed decides what is drawn in the game, and which seat is Player 0. With two seats and the seed 3, Player 0 is
    `opponent`. `step` returns one of two mappings:

        {"next_seat": "opponent", "next_messages": [{"role": "user", "content": "[Player 1] [4]\\n[GAME] ..."}]}
        {"rewards": {"player": 1.0, "opponent": -1.0}, "episode_done": True}

    Games draw from the process-wide `random` and NumPy. Each game has its own random states, which replace the states
    of the process during the game's moves.

    Args:
        env_id: Id of the game, such as `GuessTheNumber-v0`, `TicTacToe-v0`, `Nim-v0` or `KuhnPoker-v0`. Some load word
            lists from the network.
        players: Number of players.
        options: Arguments of textarena for the game, such as `{max_number: 50}`.

    Raises:
        UserError: textarena is not installed, or has no such game.
    """

    _drawing: ClassVar[Lock] = Lock()  # of the process-wide states

    def __init__(self, env_id: str, players: int = 1, options: Mapping[str, Any] | None = None) -> None:
        textarena = _package_with(env_id)
        self._draws = OwnDraws()
        self._seats = self.seats(env_id, players)
        with self._own_states():
            self._game = textarena.make(env_id, **(options or {}))
        self._bare = self._game  # without what rewrites observations
        while isinstance(self._bare, textarena.Wrapper):
            self._bare = self._bare.env
        self._own_move = textarena.ObservationType.PLAYER_ACTION

    @classmethod
    def seats(cls, env_id: str, players: int = 1, options: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """Names of the seats, before a game is constructed: `("player", "opponent_1", "opponent_2")` for 3 players.

        Raises:
            UserError: textarena is not installed, or has no such game.
        """
        _package_with(env_id)
        if players <= 2:
            return (PLAYER, OPPONENT)[:players]
        return (PLAYER, *(f"{OPPONENT}_{number}" for number in range(1, players)))

    def reset(self, **row: Any) -> None:
        of_row = hashed(json.dumps(row, sort_keys=True, default=str), size=4)  # as large as NumPy's seeds
        seed = row["seed"] if isinstance(row.get("seed"), int) else of_row
        first = seed % len(self._seats)
        self._seat_of = [*self._seats[first:], *self._seats[:first]]  # by the game's players
        self._draws = OwnDraws(seed)
        with self._own_states():
            self._game.reset(num_players=len(self._seats), seed=seed)

    def initial_observation(self) -> dict[str, Any]:
        return self._observed()

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        with self._own_states():
            done, _ = self._game.step(action=message["content"])
        if not done:
            return self._observed()
        with self._own_states():
            rewards, _ = self._game.close()
        by_seat = {self._seat_of[player]: float(reward) for player, reward in (rewards or {}).items()}
        return {"rewards": by_seat, "episode_done": True}

    def _observed(self) -> dict[str, Any]:
        """The seat whose turn it is, and what it has not seen yet, without its own moves, as a message of the user."""
        with self._own_states():
            player, said = self._bare.get_observation()
        names = self._bare.state.role_mapping
        lines = [
            f"[{names.get(who, f'Player {who}')}] {text}"
            for who, text, kind in said
            if (who, kind) != (player, self._own_move)
        ]
        content = "\n".join(lines) or "It is your turn."
        return {"next_seat": self._seat_of[player], "next_messages": [{"role": "user", "content": content}]}

    @contextmanager
    def _own_states(self) -> Iterator[None]:
        """Use this game's random states in a `with` block; other games wait until its end."""
        with self._drawing, self._draws.in_place():
            yield


def _package_with(env_id: str) -> Any:
    """Import textarena and return it; a `UserError` if it is not installed, or has no such game."""
    require("textarena", f"the game {env_id!r}", "games")
    import textarena

    games = textarena.envs.registration.ENV_REGISTRY
    if env_id not in games:
        raise UserError(f"`env_id` is {env_id!r}, and textarena has no such game.{did_you_mean(env_id, games)}")
    return textarena
