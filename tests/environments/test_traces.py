"""Conversations that were written down: their tokens are those of a conversation with the same words."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow.data.prompts import Encoder, PromptData
from rlflow.environments.bridge import message
from rlflow.environments.conversation_format import conversation_tokens
from rlflow.environments.environment import Environment
from rlflow.environments.template_bridge import TemplateBridge
from rlflow.errors import UserError
from rlflow.models.tiny import tiny_tokenizer
from tests.data.list_source import Listed

TOKENIZER = tiny_tokenizer()
BRIDGE = TemplateBridge(TOKENIZER)
ASKED, FIRST, ANSWER, SECOND = (
    message(*each) for each in (("user", "1+1"), ("assistant", "3"), ("user", "no"), ("assistant", "2"))
)


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


def test_the_turns_of_the_policy_are_learned_with_the_token_that_ends_each() -> None:
    prompt, tokens, written = conversation_tokens([ASKED, FIRST, ANSWER, SECOND], BRIDGE, ids, "a row")

    assert prompt == ids("<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n")
    assert tokens == ids("3<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n2<|im_end|>")
    learned = [token for token, by_policy in zip(tokens, written, strict=True) if by_policy]
    assert learned == ids("3<|im_end|>2<|im_end|>")


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([FIRST, ANSWER, SECOND], "a row has the roles assistant, user, assistant; .* begins with a prompt and ends"),
        ([ASKED, FIRST, ANSWER], "a row has the roles user, assistant, user; .* ends with a turn of `assistant`"),
        ([ASKED], "a row has the roles user; "),
        ([ASKED, FIRST, SECOND], "two turns of `assistant` that nothing answers between; join them"),
        ([ASKED, {**FIRST, "tool_calls": [{}]}], "with `tool_calls`; write the calls into its content"),
        ([ASKED, {"role": "me", "content": ""}], "not a message with a role and content"),
    ],
)
def test_what_is_not_a_conversation_to_learn_from_is_named(messages: list[Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        conversation_tokens(messages, BRIDGE, ids, "a row")


def test_a_dataset_of_conversations_shows_the_policy_the_environment_s_tools() -> None:
    environment = Environment(tools=["tests.environments.games.add"])
    told = TemplateBridge(TOKENIZER, environment.definitions[""].schemas).begin([ASKED])
    source = Listed([{"messages": [ASKED, FIRST]}])
    data = PromptData(source, response="messages", chat_template=True).resolved()

    example = Encoder(data, TOKENIZER, environment)(source, [0])[0]

    assert (example.prompt_ids, example.response_ids) == (told, ids("3<|im_end|>"))
    assert "add(a, b)" in TOKENIZER.decode(told)


@pytest.mark.parametrize(
    ("rows", "settings", "complaint"),
    [
        ([{"m": [ASKED, FIRST]}], {"chat_template": False}, "`m` is a list of messages; set `data.chat_template"),
        (
            [{"m": [ASKED, FIRST]}, {"m": "3"}],
            {"chat_template": True},
            "row 1: column `m` is '3', and in other rows a list of messages; make them alike",
        ),
    ],
)
def test_conversations_that_cannot_be_read_are_named(rows: list[Any], settings: Any, complaint: str) -> None:
    source = Listed(rows)
    with pytest.raises(UserError, match=complaint):
        Encoder(PromptData(source, response="m", **settings).resolved(), TOKENIZER)(source, range(len(rows)))
