"""Conversations that are cut off anywhere and continued in another process: as if nobody had cut them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlflow.environments.bridge import message
from rlflow.environments.environment import Definition, defined
from rlflow.environments.host import Host, InProcess
from rlflow.environments.session import Session
from rlflow.environments.template_bridge import TemplateBridge
from rlflow.errors import UserError
from rlflow.models.tiny import tiny_tokenizer, write_tiny_model
from rlflow.rollout import RolloutEngine, Sampling, TransformersEngine
from rlflow.rollout.conversation import Conversation, Rules, converse, from_rollout, to_rollout
from rlflow.rollout.conversation_loop import ConversationLoop, EnvironmentCalls, TurnQueue
from rlflow.values.path import RowPath
from rlflow.values.rollout import Ending
from rlflow.worker import Limits, Worker
from tests.controller import answering
from tests.rollout.trained import buckets, load, perturb, setup

ROWS = [{"question": f"{number}+1="} for number in range(6)]
TOKENIZER = tiny_tokenizer()
BRIDGE = TemplateBridge(TOKENIZER)
RULES = Rules("actor", max_turns=3, longest_prompt=200, longest=90, longest_turn=6)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutEngine]:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", layers=1, max_position=512)
    model = load(folder)
    perturb(model, seed=3, scale=0.1)
    engine = setup(TransformersEngine(), folder)
    for version in range(2):
        engine.update_weights(buckets(model), version)
    yield engine
    engine.close()


@pytest.fixture
def workers() -> Iterator[Callable[[], Host]]:
    """Makes processes, which end with the test."""
    made: list[Host] = []

    def worker() -> Host:
        made.append(Worker(Limits(timeout_s=20)))
        return made[-1]

    yield worker
    for each in made:
        each.close()


def run(
    engine: RolloutEngine,
    host: Callable[[], Host],
    definition: Definition,
    rules: Rules,
    begun: Sequence[Conversation | None],
) -> list[Conversation]:
    """Greedily, each until it is over or cut off, on hosts that nobody had before."""
    calls = EnvironmentCalls(1)
    queues = {"actor": TurnQueue(engine, Sampling(6, 0.0, (TOKENIZER.eos_token_id, BRIDGE.end)), 1)}
    conversations = []
    for number, (row, there) in enumerate(zip(ROWS, begun, strict=True)):
        made = 0 if there is None else there.calls
        session = Session(definition, host(), row, seed=number, calls=made)
        prompt = [message("user", row["question"])]
        conversations.append(converse(session, BRIDGE, prompt, row, lambda turn: turn, rules, there))
    try:
        return ConversationLoop[Conversation](queues, calls, lockstep=True).run(conversations, len(ROWS))
    finally:
        calls.close()


def through_a_checkpoint(conversations: Sequence[Conversation]) -> list[Conversation]:
    path = RowPath.of_groups(torch.arange(len(ROWS)))
    rollout = to_rollout(conversations, path, ROWS, 1, TOKENIZER.decode, torch.float32, cut_off=True)
    rollout = replace(rollout, progress=json.loads(json.dumps(rollout.progress)))
    return [from_rollout(rollout, row, each.session, BRIDGE) for row, each in enumerate(conversations)]


def facts(each: Conversation) -> dict[str, Any]:
    names = ("prompt", "tokens", "written", "segments", "rewards", "ended", "why", "calls", "failed", "cut")
    stripped = [{key: x for key, x in said.items() if key not in ("reward", "ended")} for said in each.messages]
    return {**{name: getattr(each, name) for name in names}, "messages": stripped}


@pytest.mark.parametrize(("budget", "in_workers"), [(1, False), (4, False), (6, False), (4, True)])
def test_a_conversation_that_is_cut_anywhere_is_continued_as_it_was(
    engine: RolloutEngine, workers: Callable[[], Host], budget: int, in_workers: bool
) -> None:
    hosts = workers if in_workers else InProcess
    definition = defined(answering.Stateful)
    whole = run(engine, hosts, definition, RULES, [None] * len(ROWS))
    assert {each.turns for each in whole} == {1, 2, 3}
    found = run(engine, hosts, definition, replace(RULES, budget=budget), [None] * len(ROWS))
    cuts, inside = 0, 0
    while any(each.ended is None for each in found):
        there = through_a_checkpoint(found)
        open_rows = [row for row, each in enumerate(there) if each.ended is None]
        cuts += len(open_rows)
        inside += sum(each.turn_open for each in there)
        assert all(each.turn_open == found[row].turn_open for row, each in enumerate(there))
        grown = run(engine, hosts, definition, replace(RULES, budget=budget), there)
        assert all(grown[row].sampled <= budget for row in open_rows)
        found = [grown[row] if row in open_rows else each for row, each in enumerate(there)]
    assert cuts > len(ROWS) // 2
    assert inside > 0 or budget == 6
    for one, expected in zip(found, whole, strict=True):
        assert facts(one) == facts(expected)
        assert one.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@pytest.mark.parametrize("smaller", [{"longest_turn": 4}, {"longest_turn": 3}, {"longest": 3}])
def test_a_resumed_conversation_longer_than_the_new_limits_ends(engine: RolloutEngine, smaller: dict[str, int]) -> None:
    definition = defined(answering.Stateful)
    cut = through_a_checkpoint(run(engine, InProcess, definition, replace(RULES, budget=4), [None] * len(ROWS)))
    turns = [list(each.tokens) if each.turn_open else [] for each in cut]
    assert any(turns)
    found = run(engine, InProcess, definition, replace(RULES, **smaller), cut)
    for each, turn in zip(found, turns, strict=True):
        assert each.ended is not None
        assert not turn or each.tokens[: each.segments[0]] == turn


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def test_tools_without_an_environment_continue_and_keep_their_count_of_calls() -> None:
    definition = defined(None, [add])
    state = Session(definition, host := InProcess(), ROWS[0], 1, seed=3)
    state.begin([], ROWS[0])
    assert state.state() == {"environment": None, "draws": None}
    session = Session(definition, host, ROWS[0], 1, seed=3, calls=4)
    session.restore({"environment": None, "draws": None})
    bridge = TemplateBridge(TOKENIZER, definition.schemas)
    said = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    reply = session.answer(bridge.read(TOKENIZER(said, add_special_tokens=False)["input_ids"]), 1)
    assert "refused: no more than 1" in reply.messages[0]["content"]


def test_an_environment_that_cannot_be_continued_fails(engine: RolloutEngine) -> None:
    rules = replace(RULES, budget=4, on_failure="zero")
    definition = defined(answering.Unloadable)
    cut = run(engine, InProcess, definition, rules, [None] * len(ROWS))
    assert any(each.turn_open for each in cut)
    failed = run(engine, InProcess, definition, rules, through_a_checkpoint(cut))
    for each in failed:
        assert (each.ended, sum(each.rewards)) == (Ending.FAILED, 0.0)
        assert [said["role"] for said in each.messages].count("assistant") == each.turns
    with pytest.raises(UserError, match=r"Unloadable` failed at turn 1: `load_state_dict` raised RuntimeError: broke"):
        run(engine, InProcess, definition, replace(rules, on_failure="raise"), through_a_checkpoint(cut))


def test_a_state_that_json_has_not_is_refused(engine: RolloutEngine) -> None:
    with pytest.raises(UserError, match=r"Unserializable.state_dict` returned .* that JSON cannot hold .*\(the row is"):
        run(engine, InProcess, defined(answering.Unserializable), replace(RULES, budget=4), [None] * len(ROWS))


def test_half_of_what_continues_an_environment_is_refused() -> None:
    class Half(answering.Counting):
        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(UserError, match=r"Half` has `state_dict` alone; a conversation is continued by both"):
        defined(Half)
