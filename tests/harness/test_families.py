"""Families of models through the door: the policy reads what the chat template writes, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import pytest

from rlflow.environments.bridge import Message, message
from tests.environments.families import SCHEMA, tokenizer_of
from tests.harness.episodes import ScriptedConversations, played, running, says

CALL = {
    "id": "000000000",
    "type": "function",
    "function": {"name": "guess", "arguments": {"word": "a b"}},
}
THOUGHT = "<think>\nwhy\n</think>\n\n"


class Written:
    """The texts that a family's chat template writes."""

    def __init__(self, family: str, tools: bool, renderer: Any = None) -> None:
        self.tokenizer = tokenizer_of(family)
        self.tools = [SCHEMA] if tools else []
        self.renderer = renderer
        # A turn of GLM's has no end of its own: who speaks next ends it.
        self.end = "<|observation|>" if family == "glm-4.5" else self.tokenizer.eos_token
        self.end_id = self.tokenizer.convert_tokens_to_ids(self.end)

    def text(self, messages: Sequence[Message], generate: bool = True) -> str:
        tools = self.tools or None
        return str(
            self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=generate, tokenize=False)
        )

    def reply(self, messages: Sequence[Message], turn: Message) -> str:
        """The policy's text for this turn, without the token that ends it."""
        whole = self.text([*messages, turn], generate=False).removeprefix(self.text(messages))
        return whole.partition(self.end)[0]

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def played(self, replies: Sequence[str], messages: Sequence[Message]) -> ScriptedConversations:
        """An agent that gets these replies, and answers them by these messages."""
        row = {"question": "2+3=", "tools": self.tools, "messages": list(messages)}
        with running(of=self.tokenizer, longest_prompt=4000, renderer=self.renderer) as runner:
            engine = says(*replies, of=self.tokenizer, end=self.end_id)
            return played("follows", engine, [row], runner=runner, longest=2000)


@pytest.mark.parametrize(
    ("family", "tools", "renderer"),
    [
        ("qwen2.5", True, None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("qwen2.5", False, None),
                ("qwen3-coder", False, None),
                ("qwen3-coder", True, None),
                ("llama-3", False, None),
                ("llama-3", True, None),
                ("mistral", False, None),
                ("mistral", True, None),
                ("qwen3", True, None),
                ("qwen3", True, {"name": "qwen3", "thinking_retention": "all"}),
                ("glm-4.5", True, {"name": "glm-4.5", "thinking_retention": "all"}),
            ]
        ),
    ],
)
def test_an_agent_s_calls_are_one_row_with_the_tokens_of_the_chat_template(
    family: str, tools: bool, renderer: Any
) -> None:
    """Each prompt, with what was sampled after it, begins the row; tokenizers of bytes write a text in one way."""
    written = Written(family, tools, renderer)
    thought = THOUGHT.rstrip() if family == "qwen3" else ""  # which its template keeps before a tool's answer
    turn = message("assistant", thought, tool_calls=[CALL]) if tools else message("assistant", "5 é")
    answer = {"role": "tool", "tool_call_id": CALL["id"], "content": "4"} if tools else message("user", "and?")
    messages, replies, prompts = [message("user", "2+3=")], [], []
    for _ in range(3):
        prompts.append(written.text(messages))
        replies.append(written.reply(messages, turn))
        messages += [turn, answer]
    made = written.played(replies, [answer, answer])
    ((_, prompt, response, mask, *_),) = made.rows
    whole = prompt + response
    for text, reply in zip(prompts, replies, strict=True):
        begun = written.ids(text + reply + written.end)
        assert written.tokenizer.decode(whole[: len(begun)]) == text + reply + written.end
        assert whole[: len(begun)] == begun
    assert sum(mask) == sum(len(written.ids(reply)) + 1 for reply in replies)
    assert (made.times.episodes.refused, made.times.episodes.rewritten) == (0, 0)


def test_a_template_that_drops_earlier_thoughts_makes_a_row_of_each_turn() -> None:
    """Qwen3's: where the user answers, earlier thoughts go; where they were none, the row goes on."""
    written = Written("qwen3", tools=False)
    replies, answer = [THOUGHT + "4", "5", THOUGHT + "6"], message("user", "and?")
    made = written.played(replies, [answer, answer])
    messages, texts = [message("user", "2+3=")], []
    for reply in replies:
        texts.append(written.text(messages) + reply + written.end)
        messages += [message("assistant", reply), answer]
    assert texts[2].startswith(texts[1])
    assert THOUGHT not in texts[1]
    rows = [written.tokenizer.decode(row[1] + row[2]) for row in made.rows]
    assert sorted(rows) == sorted([texts[0], texts[2]])
    trained = sum(sum(row[3]) for row in made.rows)
    assert trained == sum(len(written.ids(reply)) + 1 for reply in replies)
    assert made.times.episodes.rewritten == 1


def test_the_result_of_a_tool_has_the_name_of_the_call_with_its_id() -> None:
    tokenizer = copy(tokenizer_of("qwen3-coder"))
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool_response>", "{{ message.name }} says", 1)
    engine = says(
        "<tool_call>\n<function=second>\n</function>\n</tool_call>", "5", of=tokenizer, end=tokenizer.eos_token_id
    )
    with running(of=tokenizer, longest_prompt=4000) as runner:
        made = played("calls_the_second_tool", engine, runner=runner, longest=2000)
    ((_, prompt, response, *_),) = made.rows
    assert "<|im_start|>user\nsecond says\n5\n" in tokenizer.decode(prompt + response)
    assert made.rollout.returns.sum() == 1.0
