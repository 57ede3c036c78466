"""Turns in tokens: what a policy sampled stays, whatever comes after it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from rlflow.environments.bridge import message
from rlflow.environments.template_bridge import TemplateBridge
from rlflow.errors import UserError
from rlflow.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tests.environments.families import SCHEMA, tokenizer_of

TOKENIZER = tiny_tokenizer(2048)
PIECES = st.one_of(st.text(max_size=4), st.sampled_from(["<tool_call>", "[TOOL_CALLS]", '{"name": "gu', "☃é"]))
WORDS = st.text(alphabet="abc 123+=?\n", max_size=12)


@settings(max_examples=50, deadline=None)
@given(
    first=WORDS,
    turns=st.lists(st.tuples(WORDS, st.lists(WORDS, min_size=1, max_size=2), st.booleans()), min_size=1, max_size=4),
)
def test_every_beginning_of_a_conversation_stays_to_the_byte(
    first: str, turns: list[tuple[str, list[str], bool]]
) -> None:
    """And the whole of it is what the template writes of the messages."""
    bridge = TemplateBridge(TOKENIZER)
    messages = [message("user", first)]
    tokens = bridge.begin(messages)
    for spoken, answers, ended in turns:
        before = list(tokens)
        turn = TOKENIZER(spoken, add_special_tokens=False)["input_ids"] + ([bridge.end] if ended else [])
        new = [message("user", answer) for answer in answers]
        tokens += turn + bridge.after(new, turn, tokens)
        assert tokens[: len(before)] == before
        messages += [message("assistant", spoken), *new]
    whole = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokens == TOKENIZER(whole, add_special_tokens=False)["input_ids"]


def with_template(template: str) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer(2048)
    tokenizer.chat_template = template
    return tokenizer


def test_a_template_that_drops_earlier_thoughts_is_refused_with_what_differs() -> None:
    """As DeepSeek-R1's and Qwen3's, which take the thoughts out of all turns but the last."""
    kept = "{% if loop.last %}{{ message.content }}{% else %}{{ message.content.split('</think>')[-1] }}{% endif %}"
    with pytest.raises(UserError, match=r"changes earlier turns .*: from token 31 on, '<think>.*' becomes '"):
        TemplateBridge(with_template(CHAT_TEMPLATE.replace("{{ message.content }}", kept)))


def test_a_template_may_know_no_system_role() -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    bridge = TemplateBridge(with_template(refuses + CHAT_TEMPLATE))
    assert bridge.begin([message("user", "?")]) == TemplateBridge(TOKENIZER).begin([message("user", "?")])
    with pytest.raises(UserError, match=r"refuses the messages .System role not supported"):
        bridge.begin([message("system", "s"), message("user", "?")])


def test_a_template_that_ends_turns_with_plain_text_is_refused() -> None:
    with pytest.raises(UserError, match=r"ends a turn of the policy with .*, which is not a special token"):
        TemplateBridge(with_template(CHAT_TEMPLATE.replace("<|im_end|>", "")))


def test_a_template_that_shows_no_tools_is_refused_if_there_are_tools() -> None:
    schema = {"type": "function", "function": {"name": "guess", "parameters": {}}}
    with pytest.raises(UserError, match="does not show the policy its tools, so it cannot call `guess`"):
        TemplateBridge(with_template(CHAT_TEMPLATE.replace("if tools", "if false")), [schema])


def test_a_model_without_a_template_is_refused() -> None:
    tokenizer = tiny_tokenizer(2048)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        TemplateBridge(tokenizer)


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3-coder", "llama-3", "mistral"])
@settings(max_examples=15, deadline=None)
@given(
    turns=st.lists(st.tuples(st.lists(PIECES, max_size=5), st.text(max_size=6), st.booleans()), min_size=1, max_size=3)
)
def test_every_beginning_stays_in_each_family_s_template(family: str, turns: list[tuple[list[str], str, bool]]) -> None:
    """With unicode, broken calls, and turns that were cut; a tool's answer is what the template writes after a turn."""
    tokenizer = tokenizer_of(family)
    bridge = TemplateBridge(tokenizer, [SCHEMA])
    asked = [message("user", "?")]
    tokens = bridge.begin(asked)
    end = tokenizer.convert_ids_to_tokens(bridge.end)
    answered = [*asked, message("assistant", "x"), message("tool", "", tool_call_id="000000000")]
    before = tokenizer.apply_chat_template(answered[:2], tools=[SCHEMA], tokenize=False).rpartition(end)[0]
    for pieces, answer, ended in turns:
        spoken = "".join(pieces)
        turn = tokenizer(spoken, add_special_tokens=False)["input_ids"] + ([bridge.end] if ended else [])
        assert bridge.read(turn, tokens).whole == tokenizer.decode(turn, skip_special_tokens=True)
        following = bridge.after([message("tool", answer)], turn, tokens)
        answered[2]["content"] = answer
        whole = tokenizer.apply_chat_template(answered, tools=[SCHEMA], add_generation_prompt=True, tokenize=False)
        wanted = tokenizer(whole.removeprefix(before), add_special_tokens=False)["input_ids"]
        assert ([] if ended else [bridge.end]) + wanted[1:] == following
        tokens = tokens + turn + following
