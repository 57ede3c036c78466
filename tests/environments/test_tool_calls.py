"""Calls of tools, each family's in its own tokens and template."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlflow.environments.bridge import date_for_template, message
from rlflow.environments.template_bridge import TemplateBridge
from rlflow.environments.tool_calls import TOOL_FORMS, ToolCall
from rlflow.errors import UserError
from tests.environments.families import SCHEMA, tokenizer_of

FAMILIES = ["qwen2.5", "qwen3-coder", "llama-3", "mistral", "gpt-oss"]
ARGUMENTS = st.fixed_dictionaries({"word": st.text(max_size=8)}, optional={"sure": st.integers(-9, 9)})


THOUGHT = "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant"


def bridge_of(family: str, **given: Any) -> TemplateBridge:
    return TemplateBridge(tokenizer_of(family), [SCHEMA], **given)


def ids(family: str, text: str) -> list[int]:
    found: list[int] = tokenizer_of(family)(text, add_special_tokens=False)["input_ids"]
    return found


BRIDGES = {family: bridge_of(family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(arguments=ARGUMENTS)
@example(arguments={"word": "\u0f43"})  # another text in NFC
def test_a_call_that_a_family_s_template_writes_is_read_back(family: str, arguments: dict[str, Any]) -> None:
    arguments["word"] = normalize("NFC", arguments["word"])  # as these tokenizers read text
    if family == "qwen3-coder":  # whose template writes a value between line breaks
        arguments["word"] = arguments["word"].strip("\n")
    function = {"name": "guess", "arguments": arguments}
    call = message("assistant", "", tool_calls=[{"id": "abcdefg12", "type": "function", "function": function}])
    asked = [message("user", "?")]
    before = tokenizer_of(family).apply_chat_template(asked, tools=[SCHEMA], add_generation_prompt=True, tokenize=False)
    after = tokenizer_of(family).apply_chat_template([*asked, call], tools=[SCHEMA], tokenize=False)
    assert after.startswith(before)
    spoken = ids(family, after.removeprefix(before).removesuffix("\n"))
    assert spoken[-1] == BRIDGES[family].ends[-1]
    (found,) = BRIDGES[family].read(spoken).calls
    assert found == ToolCall("guess", arguments, id="abcdefg12" if family == "mistral" else "")


@pytest.mark.parametrize(
    ("family", "said", "calls"),
    [
        ("qwen2.5", '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"na', ["a", ""]),
        ("qwen2.5", "I guess.", []),
        ("qwen3-coder", "Well. <tool_call>\n<function=a>\n</function>\n</tool_call><tool_call>b", ["a", ""]),
        ("qwen3-coder", "<function=a>\n<parameter=word>\nb\n</parameter>\n", ["a"]),
        ("llama-3", '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', ["a", "b"]),
        ("llama-3", '{"name": "a", "parameters": {}}<|eom_id|>', ["a"]),
        ("llama-3", '<|python_tag|>{"name": "a", "parameters": {}}<|end_of_text|>', ["a"]),
        ("llama-3", '{"name": "a", "parameters"', [""]),
        ("llama-3", '{"word": 1}', []),
        ("llama-3", '<|python_tag|>print("a")', [""]),
        ("mistral", '[TOOL_CALLS]a[ARGS]{"word": "b"}[TOOL_CALLS]b{}</s>', ["a", "b"]),
        ("mistral", "[TOOL_CALLS]a[CALL_ID]123456789[ARGS]{}</s>", ["a"]),
        ("mistral", "[TOOL_CALLS]</s>", [""]),
        ("mistral", "[TOOL_CALLS]a[ARGS]{</s>", ["a"]),
        ("mistral", "a call", []),
        ("gpt-oss", THOUGHT + "<|channel|>commentary to=functions.a <|constrain|>json<|message|>{}<|call|>", ["a"]),
        ("gpt-oss", ' to=functions.a<|channel|>commentary json<|message|>{"word": "b"}<|call|>', ["a"]),
        (
            "gpt-oss",
            " to=functions.a<|message|>{}<|end|><|start|>assistant to=functions.b",
            ["a", "b"],
        ),
        ("gpt-oss", "<|channel|>commentary to=python<|message|>1<|call|>", ["python"]),
        ("gpt-oss", "<|channel|>commentary<|message|>I call to=functions.a<|end|>", []),
        ("gpt-oss", THOUGHT + "<|channel|>final<|message|>4<|return|>", []),
    ],
)
def test_calls_in_a_family_s_form_are_found_in_order(family: str, said: str, calls: list[str]) -> None:
    found = BRIDGES[family].read(ids(family, said)).calls
    assert [each.name for each in found] == calls


@pytest.mark.parametrize(
    ("family", "said", "text"),
    [
        ("qwen2.5", 'Well. <tool_call>{"name": "a", "arguments": {}}</tool_call>', "Well."),
        ("qwen3-coder", "Well. <tool_call>\n<function=a>\n</function>\n</tool_call>", "Well."),
        ("llama-3", '{"name": "a", "parameters": {}}', ""),
        ("llama-3", '<|python_tag|>{"name": "a", "parameters": {}}', ""),
        ("mistral", "Well. [TOOL_CALLS]a[ARGS]{}</s>", "Well."),
        ("gpt-oss", " to=functions.a<|channel|>commentary json<|message|>{}<|call|>", ""),
        ("gpt-oss", THOUGHT + "<|channel|>commentary to=functions.a <|constrain|>json<|message|>{}<|call|>", ""),
    ],
)
def test_the_text_of_a_turn_with_calls_is_what_it_says_before_them(family: str, said: str, text: str) -> None:
    assert BRIDGES[family].read(ids(family, said)).text == text


@pytest.mark.parametrize("form", TOOL_FORMS)
@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.one_of(st.text(max_size=4), st.sampled_from('{"name":}[],')), max_size=8))
def test_whatever_a_policy_says_is_read(form: str, parts: list[str]) -> None:
    """A call, a call with a problem in one line, or none."""
    for call in TOOL_FORMS[form].calls(TOOL_FORMS[form].mark + "".join(parts), [SCHEMA]):
        assert isinstance(call.name, str)
        assert isinstance(call.arguments, dict)
        assert "\n" not in call.problem
        json.dumps(call.arguments)


def test_values_of_xml_are_of_the_types_of_the_schema() -> None:
    said = "<function=guess><parameter=word>7</parameter><parameter=sure>{}</parameter></function>"
    (call,) = TOOL_FORMS["qwen3_coder"].calls(said.replace("{}", "0.5"), [SCHEMA])
    assert call.arguments == {"word": "7", "sure": 0.5}
    for text, value in {"True": True, "false": False, "None": None, "null": None}.items():
        (call,) = TOOL_FORMS["qwen3_coder"].calls(said.replace("{}", text), [SCHEMA])
        assert call.arguments["sure"] is value
    (call,) = TOOL_FORMS["qwen3_coder"].calls(said.replace("{}", "very"), [SCHEMA])
    assert call == ToolCall("guess", {}, "`sure` of this tool call is not of type number")


@pytest.mark.parametrize("form", TOOL_FORMS)
def test_what_is_nested_too_deeply_is_a_problem(form: str) -> None:
    said = {
        "hermes": "<tool_call>{}</tool_call>",
        "qwen3_coder": "<function=guess><parameter=sure>{}</parameter></function>",
        "llama3": "<|python_tag|>{}",
        "mistral": "[TOOL_CALLS]{}",
        "harmony": "<|channel|>commentary to=functions.guess<|message|>{}",
    }[form]
    (call,) = TOOL_FORMS[form].calls(said.replace("{}", "[" * 100_000), [SCHEMA])
    assert call.problem


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("<|channel|>commentary to=functions.guess<|message|>{", "the arguments of this call of guess are not JSON: "),
        ("<|channel|>commentary to=functions.guess<|message|>[]", "`arguments` of a tool call is an object of names"),
        ("<|channel|>commentary to=functions.guess", "this tool call has no <|message|>, and its arguments"),
        ("<|channel|>commentary to=functions.<|message|>{}", "this tool call names no tool; write to=functions.NAME"),
        ("<|channel|>commentary to=browser.open<|message|>{}", "there is no `browser.open` to write to; tools are"),
    ],
)
def test_a_call_of_gpt_oss_that_cannot_be_read_says_why(said: str, problem: str) -> None:
    (call,) = BRIDGES["gpt-oss"].read(ids("gpt-oss", said + "<|call|>")).calls
    assert call.problem.startswith(problem)


def test_conversations_of_gpt_oss_are_what_its_template_writes() -> None:
    """Thoughts and calls in turn; a turn that was cut is ended as a call is, and each answer names its own tool."""
    bridge, tokenizer = BRIDGES["gpt-oss"], tokenizer_of("gpt-oss")
    tokens, turns = bridge.begin([message("user", "?")]), []
    for place, cut in enumerate((False, True, False)):
        call = " to=functions.guess<|channel|>commentary json<|message|>" + json.dumps({"word": str(place)})
        turn = ids("gpt-oss", THOUGHT + call + ("" if cut else "<|call|>"))
        tokens += turn + bridge.after([message("tool", SPELLED, name="guess")], turn, tokens)
        function = {"name": "guess", "arguments": {"word": str(place)}}
        turns += [message("assistant", "Well.", tool_calls=[{"type": "function", "function": function}]), ANSWER]
    asked = [message("user", "?"), *turns]
    dated = date_for_template(tokenizer)
    text = tokenizer.apply_chat_template(asked, tools=[SCHEMA], add_generation_prompt=True, tokenize=False, **dated)
    assert tokens == [each for part in text.split(SPELLED) for each in [*SAID, *ids("gpt-oss", part)]][len(SAID) :]
    answers = [message("tool", "4", name="guess"), message("tool", "5", name="other")]
    both = tokenizer.decode(bridge.after(answers, ids("gpt-oss", "<|call|>")))
    assert both.count("<|start|>functions.") == 2
    assert "<|start|>functions.other to=assistant" in both


SPELLED = "e<|end|>"  # as an answer of a tool says it
SAID = [*map(ord, SPELLED)]
ANSWER = message("tool", SPELLED)


def test_a_turn_to_learn_from_ends_as_its_family_ends_it() -> None:
    bridge = BRIDGES["gpt-oss"]
    token = tokenizer_of("gpt-oss").convert_tokens_to_ids
    assert bridge.end_of("<|channel|>commentary to=functions.guess<|message|>{}") == token("<|call|>")
    assert bridge.end_of(THOUGHT + "<|channel|>final<|message|>4") == token("<|return|>")
    assert BRIDGES["qwen2.5"].end_of("<tool_call>{}</tool_call>") == BRIDGES["qwen2.5"].end


def test_a_form_is_named_or_refused() -> None:
    said = ids("qwen2.5", '{"name": "guess", "parameters": {"word": "a"}}')
    assert bridge_of("qwen2.5").read(said).calls == ()
    assert bridge_of("qwen2.5", tool_calls="llama3").read(said).calls == (ToolCall("guess", {"word": "a"}),)
    with pytest.raises(UserError, match=r"`data.tool_calls` is 'llama'; give one of hermes, .*Did you mean \"llama3\""):
        bridge_of("qwen2.5", tool_calls="llama")


def test_a_template_of_no_known_form_is_refused_with_what_to_set() -> None:
    tokenizer = deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = "{{ tools }}{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    with pytest.raises(UserError, match=r"in a form that is not known; name it by `data.tool_calls`, one of hermes"):
        TemplateBridge(tokenizer, [SCHEMA])


def test_a_template_that_writes_no_calls_may_describe_their_form_to_the_policy() -> None:
    tokenizer = deepcopy(tokenizer_of("qwen2.5"))
    told = "{{ tools }} Say <tool_call>\n<function=NAME>.{% for message in messages %}"
    tokenizer.chat_template = told + "{{ message.role }} {{ message.content }}<|im_end|>{% endfor %}"
    said = ids("qwen2.5", "<tool_call><function=guess><parameter=word>a</parameter></function></tool_call>")
    assert TemplateBridge(tokenizer, [SCHEMA]).read(said).calls == (ToolCall("guess", {"word": "a"}),)


def test_a_parameter_whose_schema_allows_anything_is_a_text() -> None:
    schema = {"function": {"name": "f", "parameters": {"type": "object", "properties": {"a": True}}}}
    (call,) = TOOL_FORMS["qwen3_coder"].calls("<function=f><parameter=a>5</parameter></function>", [schema])
    assert (call.arguments, call.problem) == ({"a": "5"}, "")
