"""Turns written and read by the package `renderers`, for families whose templates change earlier turns."""

from __future__ import annotations

import socket
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlflow.environments.bridge import Message, message
from rlflow.environments.renderer_bridge import RendererBridge
from rlflow.environments.template_bridge import TemplateBridge
from rlflow.environments.tool_calls import ToolCall
from rlflow.errors import UserError
from tests.environments.families import SCHEMA, tokenizer_of

QWEN3, GPT_OSS = tokenizer_of("qwen3"), tokenizer_of("gpt-oss")
KEEPS = {"name": "qwen3", "thinking_retention": "all"}
PIECES = st.one_of(
    st.text(max_size=4),
    st.sampled_from(["<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "guess"', "☃é"]),
)
TURNS = st.lists(st.tuples(st.lists(PIECES, max_size=5), st.text(max_size=4), st.booleans()), min_size=1, max_size=3)


def ids(text: str) -> list[int]:
    found: list[int] = QWEN3(text, add_special_tokens=False)["input_ids"]
    return found


def tool(content: str) -> Message:
    return message("tool", content, name="guess")


@pytest.mark.parametrize("role", ["user", "tool"])
@settings(max_examples=40, deadline=None)
@given(turns=TURNS)
@example(turns=[([], "e\u0301 \u2126", False)])
def test_every_beginning_stays_to_the_byte_whatever_a_policy_says(
    role: str, turns: list[tuple[list[str], str, bool]]
) -> None:
    """Thoughts that have no end, broken calls and turns that were cut: the next prompt has the answer all the same."""
    bridge = RendererBridge(QWEN3, KEEPS, [SCHEMA], role)
    tokens = bridge.begin([message("user", "?")])
    for pieces, answer, ended in turns:
        turn = ids("".join(pieces)) + ([bridge.end] if ended else [])
        said = bridge.read(turn, tokens)
        assert isinstance(said.text, str)
        new = [message("user", answer)] if role == "user" else [tool(answer)]
        following = bridge.after(new, turn, tokens)
        text = QWEN3.decode(following)
        ended = turn[-1:] == [bridge.end]
        assert text.startswith("\n<|im_start|>user\n" if ended else ("<|im_end|>\n", "</think><|im_end|>\n"))
        assert normalize("NFC", answer) in text  # as the tokenizer writes it
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        tokens = tokens + turn + following


def test_a_conversation_is_what_the_family_s_template_writes() -> None:
    """Of tools and one question, after which Qwen3's template too leaves thoughts where they are."""
    bridge = RendererBridge(QWEN3, "qwen3", [SCHEMA], "tool")
    call = '{"name": "guess", "arguments": {"word": "a"}}'
    tokens = bridge.begin([message("system", "s"), message("user", "?")])
    for _ in range(2):
        turn = ids(f"<think>\nt\n</think>\n\n<tool_call>\n{call}\n</tool_call><|im_end|>")
        assert bridge.read(turn, tokens).calls == (ToolCall("guess", {"word": "a"}),)
        tokens += turn + bridge.after([tool("é?")], turn, tokens)
    function = {"name": "guess", "arguments": {"word": "a"}}
    spoken = message("assistant", "", reasoning_content="t", tool_calls=[{"type": "function", "function": function}])
    messages = [message("system", "s"), message("user", "?"), spoken, tool("é?"), spoken, tool("é?")]
    whole = QWEN3.apply_chat_template(messages, tools=[SCHEMA], add_generation_prompt=True, tokenize=False)
    assert tokens == ids(whole)


def test_the_family_s_template_alone_is_refused_with_the_first_differing_token() -> None:
    """An empty thought stands before the last turn alone."""
    with pytest.raises(UserError, match=r"from token 31 on, '<think>.*' becomes '☃answer☃<.*set `data.renderer`"):
        TemplateBridge(QWEN3)
    assert len(ids("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n")) == 31


def test_thoughts_and_calls_are_read_separately() -> None:
    bridge = RendererBridge(QWEN3, "qwen3", [SCHEMA], "tool")
    begun = bridge.begin([message("user", "?")])
    said = bridge.read(ids("<think>hm</think>Let <|im_start|>me see.<tool_call>{broken</tool_call><|im_end|>"), begun)
    assert said.text == "Let me see."
    assert said.whole == "<think>hm</think>Let me see.<tool_call>{broken</tool_call>"
    assert said.calls == (ToolCall("", {}, "this tool call is not JSON"),)
    for broken in ('{"name": ["a"]}', '{"name": "guess", "arguments": [1]}', "[" * 100_000, '{"name": "guess"'):
        for end in ("</tool_call><|im_end|>", ""):
            (call,) = bridge.read(ids(f"<tool_call>{broken}{end}"), begun).calls
            assert call.problem


def test_a_renderer_that_drops_thoughts_at_a_message_is_refused_before_the_run() -> None:
    with pytest.raises(
        UserError, match=r"changes earlier turns when a message of role user comes.*set `thinking_retention: all`"
    ):
        RendererBridge(QWEN3, "qwen3")
    with pytest.raises(UserError, match=r"the renderer `default` changes earlier turns.*leave `data.renderer` out"):
        RendererBridge(QWEN3, "default")


@pytest.mark.parametrize(
    ("renderer", "complaint"),
    [
        ("qwen4", r"`data.renderer` is 'qwen4': .*Known: .*'qwen3', .*; name one of these"),
        ("auto", r"`data.renderer` is auto, and renderers' table has no model ''; name the renderer"),
        ({"name": "qwen3", "enable_thoughts": False}, r"1 validation error .* enable_thoughts Extra inputs"),
        ({"name": "qwen3", "enable_thinking": "perhaps"}, r"'enable_thinking': 'perhaps'}: 1 validation error"),
        ("llama-3", r"does not fit the model's tokenizer \(Special token '<\|begin_of_text\|>' not found"),
        ("gpt-oss", r"reads OpenAI's vocabulary from the folder that TIKTOKEN_ENCODINGS_BASE names"),
    ],
)
def test_what_is_not_a_renderer_of_this_model_is_refused_in_one_line(
    renderer: Any, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    with pytest.raises(UserError, match=complaint) as refused:
        RendererBridge(QWEN3, renderer)
    assert "\n" not in str(refused.value)


def test_the_table_goes_by_the_model_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QWEN3, "name_or_path", "Qwen/Qwen3-0.6B")
    begun = RendererBridge(QWEN3, "auto", answer="tool").begin([message("user", "?")])
    assert begun == ids("<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n")


def test_llama_s_renderer_writes_and_reads_its_family_s_tokens() -> None:
    tokenizer = tokenizer_of("llama-3")
    bridge = RendererBridge(tokenizer, "llama-3", [SCHEMA], "tool")
    begun = bridge.begin([message("user", "?")])
    turn = tokenizer.encode('{"name": "guess", "parameters": {"word": "é"}}<|eot_id|>')
    assert bridge.read(turn, begun).calls == (ToolCall("guess", {"word": "é"}),)
    wanted = (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"é"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    )
    assert tokenizer.decode(bridge.after([tool("é")], turn, begun)) == wanted


def test_glm_s_renderer_continues_as_its_family_s_template_writes() -> None:
    """A turn there has no end of its own: who speaks next ends it, so `<|observation|>` is sampled."""
    tokenizer = tokenizer_of("glm-4.5")
    bridge = RendererBridge(tokenizer, "glm-4.5", [SCHEMA], "tool")
    asked = [message("system", "s"), message("user", "?")]
    written = tokenizer.apply_chat_template(asked, tools=[SCHEMA], add_generation_prompt=True, tokenize=False)
    tokens = bridge.begin(asked)
    assert tokens == tokenizer.encode(written, add_special_tokens=False)
    call = "<tool_call>guess\n<arg_key>word</arg_key>\n<arg_value>é</arg_value>\n</tool_call>"
    turn = tokenizer.encode(f"\n<think>t</think>\n{call}<|observation|>", add_special_tokens=False)
    assert bridge.read(turn, tokens).calls == (ToolCall("guess", {"word": "é"}),)
    assert tokenizer.decode(bridge.end_of(call)) == "<|observation|>", "as a recorded turn ends"
    tokens += turn + bridge.after([tool("4<|user|>")], turn, tokens)
    function = {"name": "guess", "arguments": {"word": "é"}}
    spoken = message("assistant", "", reasoning_content="t", tool_calls=[{"type": "function", "function": function}])
    whole = tokenizer.apply_chat_template(
        [*asked, spoken, tool("4@")], tools=[SCHEMA], add_generation_prompt=True, tokenize=False
    )
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in whole.split("@"))
    assert tokens == [*before, *map(ord, "<|user|>"), *after]


class ByteHarmony:
    """In place of openai_harmony's encoder, whose vocabulary is a download: a message is its JSON."""

    def render(self, each: Any) -> list[int]:
        end = "<|call|>" if each.author.role.value == "assistant" and each.recipient else "<|end|>"
        return list(GPT_OSS.encode(f"<|start|>{each.author.role.value}<|message|>{each.to_json()}{end}"))

    def render_conversation(self, conversation: Any) -> list[int]:
        return [token for each in conversation.messages for token in self.render(each)]


def test_gpt_oss_s_renderer_continues_after_what_it_thought(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts have a fixed date; a turn that was cut in a thought is closed, and another keeps its end."""
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", "here")
    monkeypatch.setattr("renderers.gpt_oss.load_harmony_encoding", lambda name: ByteHarmony())
    bridge = RendererBridge(GPT_OSS, "gpt-oss", [SCHEMA], "tool")
    asked = bridge.begin([message("user", "?")])
    assert '"conversation_start_date": "2024-07-26"' in GPT_OSS.decode(asked)
    call = '<|end|><|start|>assistant to=functions.guess<|channel|>commentary<|message|>{"word": "a"}<|call|>'
    for said, closed in (("Well." + call, ""), ("Well.", "<|end|>"), ("Well.<|return|>", "")):
        turn = GPT_OSS.encode(said)
        following = GPT_OSS.decode(bridge.after([tool("é")], turn, asked))
        assert following.startswith(closed + "<|start|>tool<|message|>")
        assert following.endswith("<|start|>assistant<|channel|>analysis<|message|>")
    assert bridge.read(GPT_OSS.encode("Well." + call), asked).calls == (ToolCall("guess", {"word": "a"}),)
    assert GPT_OSS.decode(bridge.end_of("Well." + call)) == "<|call|>", "as a recorded turn ends"


def test_a_renderer_never_asks_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: Any, **named: Any) -> None:
        raise SystemExit("the network was asked")

    for place in (socket.socket, "connect"), (socket, "getaddrinfo"), (socket, "create_connection"):
        monkeypatch.setattr(*place, refused)
    bridge = RendererBridge(QWEN3, "qwen3", answer="tool")
    bridge.after([tool("?")], [bridge.end], bridge.begin([message("user", "?")]))
    with pytest.raises(UserError, match="renderers' table has no model"):
        RendererBridge(QWEN3, "auto")


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.errors.find_spec", lambda module: None)
    with pytest.raises(UserError, match=r"`data.renderer` needs renderers, .*pip install 'rlflow-llm\[renderers\]'"):
        RendererBridge(QWEN3, "qwen3")
