"""Conversations of a script: those that a policy with its words would have."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow.data.prompts import Encoder, PromptData
from rlflow.data.scripted_conversations import ScriptedConversations
from rlflow.environments.environment import Environment
from rlflow.environments.session import Session
from rlflow.environments.template_bridge import TemplateBridge
from rlflow.errors import UserError
from rlflow.models.tiny import tiny_tokenizer
from rlflow.rollout.conversation import Conversation, Rules, converse
from rlflow.rollout.engine import Completion
from tests.data.list_source import Listed

TOKENIZER = tiny_tokenizer()
CALL = '<tool_call>{"name": "guess", "arguments": {"word": "house"}}</tool_call>'
GAME = Environment("tests.environments.games.WordGame", max_turns=4)
ROW = {"question": "Guess.", "word": "house"}


def guesses(messages: Any, row: Any, draws: Any) -> str:
    """It calls the tool without its argument, then as it should be, and then says the word."""
    return ["<tool_call>{}</tool_call>", CALL, "house"][sum(each["role"] == "tool" for each in messages)]


def spoken(environment: Environment, row: dict[str, Any], texts: list[str]) -> Conversation:
    """The conversation of a policy that says these words, from the column `question`."""
    definition, left = environment.definitions[""], list(texts)
    bridge = TemplateBridge(TOKENIZER, definition.schemas)
    prompt = [{"role": "user", "content": row["question"]}]
    rules = Rules("actor", environment.max_turns, 999, 999, 99)
    steps = converse(Session(definition, environment.host()), bridge, prompt, row, lambda turn: 0, rules)
    wish = next(steps)
    while True:
        if callable(wish):
            answer: Any = wish()
        else:
            ids = [*TOKENIZER(left.pop(0), add_special_tokens=False)["input_ids"], bridge.end]
            answer = Completion(ids, [-1.0] * len(ids), finished=True)
        try:
            wish = steps.send(answer)
        except StopIteration as end:
            conversation: Conversation = end.value
            return conversation


def test_learning_from_a_script_reads_the_tokens_of_a_policy_with_its_words() -> None:
    source = ScriptedConversations(Listed([ROW]), GAME, guesses)
    data = PromptData(source, response="messages", chat_template=True).resolved()

    (example,) = Encoder(data, TOKENIZER, GAME)(source, [0])

    of_policy = spoken(GAME, ROW, ["<tool_call>{}</tool_call>", CALL, "house"])
    assert example.prompt_ids == of_policy.prompt
    assert (example.response_ids, example.written) == (of_policy.tokens, of_policy.written)
    assert of_policy.turns == 3


def counts(messages: Any, row: Any, draws: Any) -> str:
    """Down from 5: what it says first it says to two messages, then to four."""
    return str(6 - len(messages) // 2)


def test_a_script_ends_with_the_last_turn_that_a_policy_may_take() -> None:
    environment = Environment("tests.environments.games.CountDown", max_turns=2)

    played = ScriptedConversations(Listed([{"question": "?", "start": 5}]), environment, counts)

    roles = [each["role"] for each in played[0]["messages"]]
    assert roles == ["user", "user", "assistant", "user", "assistant"]


def test_what_a_script_draws_follows_from_the_row_and_the_seed() -> None:
    def drawn(seed: int) -> list[str]:
        played = ScriptedConversations(
            Listed([ROW] * 3), GAME, lambda messages, row, draws: str(draws.random()), seed=seed
        )
        return [played[row]["messages"][-1]["content"] for row in (2, 0, 1)]

    assert drawn(0) == drawn(0)
    assert len({*drawn(0), *drawn(1)}) == 6


def test_an_environment_that_fails_under_a_script_is_named_with_the_row() -> None:
    with pytest.raises(
        UserError, match=r"listed, scripted, row 0: the environment .* at turn 0: `reset` raised KeyError"
    ):
        ScriptedConversations(Listed([{"question": "?"}]), GAME, guesses)[0]


def test_a_form_of_tool_calls_that_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match=r"`tool_calls` is 'hermès'; give one of hermes, "):
        ScriptedConversations(Listed([ROW]), GAME, guesses, tool_calls="hermès")


def test_calls_in_a_form_that_the_run_does_not_read_are_refused() -> None:
    source = ScriptedConversations(Listed([ROW]), GAME, guesses)
    data = PromptData(source, response="messages", chat_template=True, tool_calls="llama3").resolved()
    with pytest.raises(
        UserError, match=r"the script calls tools in the form hermes, and the model in llama3; set `too"
    ):
        Encoder(data, TOKENIZER, GAME)(source, [0])


def test_an_environment_of_several_seats_is_not_played_by_a_script() -> None:
    stones = Environment("tests.environments.games.Stones")
    with pytest.raises(UserError, match=r"games.Stones has the seats player, opponent, and a script speaks for one;"):
        ScriptedConversations(Listed([ROW]), stones, guesses)[0]
