"""Episodes with a real engine, as a node's call of `converse` runs them, without training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rlflow import Harness
from rlflow.commands.play import Player
from rlflow.context.conversations import ConversationRunner, ConversationTimes, ConverseCall
from rlflow.dag.node import BATCH
from rlflow.databuffer.transport import Transport
from rlflow.environments.conversation_format import bridge_of
from rlflow.models.tiny import tiny_tokenizer
from rlflow.rollout import RolloutEngine, Sampling, TransformersEngine
from rlflow.rollout.conversation import Conversation
from rlflow.values.layout import Layout
from rlflow.values.path import RowPath
from rlflow.values.rollout import Rollout
from rlflow.values.truncation import Truncation
from tests.rollout.trained import buckets, load, perturb, setup

LONGEST, LONGEST_PROMPT = 200, 120
AGENTS = "tests.harness.agents"


@dataclass(frozen=True)
class ScriptedConversations:
    """The result of a call."""

    rollout: Rollout
    views: list[Conversation]
    times: ConversationTimes

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """The parts of each row that do not depend on batches: path, tokens, mask, segments, rewards, end."""
        made, lengths = self.rollout, self.rollout.lengths.tolist()
        return [
            (
                tuple(made.path.numbers[row].tolist()),
                made.prompt_ids.rows()[row].tolist(),
                made.response_ids[row, : lengths[row]].tolist(),
                made.loss_mask[row, : lengths[row]].tolist(),
                made.segments.rows()[row].tolist(),
                made.turn_rewards.rows()[row].tolist(),
                int(made.inherited[row]),
                int(made.branch[row]),
                made.logprobs[row, : lengths[row]].tolist(),
            )
            for row in range(len(lengths))
        ]

    def text(self, row: int) -> str:
        """All that a row has, special tokens too."""
        return str(tokenizer().decode([*self.rows[row][1], *self.rows[row][2]]))

    def trained(self) -> list[str]:
        """The text that each row trains."""
        return [
            str(tokenizer().decode([token for token, counts in zip(row[2], row[3], strict=True) if counts]))
            for row in self.rows
        ]


@cache
def tokenizer() -> Any:
    return tiny_tokenizer(2048)


def decode(ids: Sequence[int]) -> str:
    return str(tokenizer().decode(list(ids), skip_special_tokens=True))


def sampling_engine(folder: Path) -> RolloutEngine:
    """An engine with weights of version 0 that are not flat."""
    engine, model = setup(TransformersEngine(), folder), load(folder)
    perturb(model, 0, scale=0.1)
    engine.update_weights(buckets(model), version=0)
    return engine


def says(*replies: str, of: Any = None, end: int = 3) -> Player:
    """An engine that takes turns with these words, by the tokenizer `of` a family or the tiny one."""
    return Player(iter(replies), of or tokenizer(), end, on_tokens=lambda who, ids: None)


@cache
def _harness(settings: tuple[tuple[str, Any], ...]) -> Harness:
    """One for equal settings, so that its workers serve several calls."""
    return Harness(f"{AGENTS}.acts", **dict(settings))


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": row["question"]}]


@contextmanager
def running(of: Any = None, longest_prompt: int = LONGEST_PROMPT, renderer: Any = None) -> Iterator[ConversationRunner]:
    """A runner of its own, which is closed; with the tokenizer `of` a family, or the tiny one."""
    of = of or tokenizer()
    bridge = cache(lambda definition: bridge_of(definition, of, renderer))
    read = lambda ids: str(of.decode(list(ids), skip_special_tokens=True))  # noqa: E731
    runner = ConversationRunner(bridge, messages_of, longest_prompt, read, torch.float32, 0, Transport())
    try:
        yield runner
    finally:
        runner.close()


def played(
    agent: str | list[str],
    engine: RolloutEngine,
    rows: Sequence[dict[str, Any]] = ({"question": "2+3="},),
    n: int = 1,
    runner: ConversationRunner | None = None,
    longest: int = LONGEST,
    players: Mapping[str, tuple[str, float, Truncation]] = MappingProxyType({}),
    rivals: Mapping[str, RolloutEngine] = MappingProxyType({}),
    **settings: Any,
) -> ScriptedConversations:
    """Episodes of an agent of `agents.py`, or of a program.

    Args:
        agent: Name of the agent; or the dotted path of another one; or a program.
        engine: Takes the policy's turns.
        rows: Rows of the dataset.
        n: Episodes of each.
        runner: Runs them; None for one of its own.
        longest: Tokens of a row after its prompt, at most.
        players: Policies that answer to names in the policy's place, and how they are sampled.
        rivals: Engines of these policies.
        settings: Settings of the harness.
    """
    if runner is None:
        with running() as own:
            return played(agent, engine, rows, n, own, longest, players, rivals, **settings)
    harness = _harness(tuple({"timeout_s": 60, "max_concurrent": 2, **settings}.items()))
    if isinstance(agent, list) or "." in agent:
        harness = Harness(agent, **{"timeout_s": 60, "max_concurrent": 2, **settings})
    rows = [{"agent": agent, **row} for row in rows]
    path = RowPath(torch.arange(len(rows))[:, None], (BATCH,))
    sampling = Sampling(longest, stop_token_ids=(0,))
    engines = {"actor": engine, **rivals}
    call = ConverseCall(0, "rollout", "actor", dict.fromkeys(engines, 0), Layout((0,), 1), players)
    return ScriptedConversations(*runner.run(engines, harness, rows, path, n, sampling, call))
