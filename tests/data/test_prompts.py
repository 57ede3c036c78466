"""Token ids of a row. The tokenizer gives each character its code, so ids are read as text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing

from rlflow.data.prompts import Encoder, Example, PromptData
from rlflow.environments.environment import Environment
from rlflow.errors import UserError
from rlflow.models.tiny import tiny_tokenizer
from tests.data.list_source import Listed

TOKENIZER = tiny_tokenizer()


def encode(row: dict[str, Any], tokenizer: Any = TOKENIZER, **settings: Any) -> Example:
    source = Listed([row])
    return Encoder(PromptData(source, **settings).resolved(), tokenizer)(source, [0])[0]


def codes(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_a_plain_prompt_is_its_characters() -> None:
    assert encode({"question": "1+1="}).prompt_ids == codes("1+1=")


def test_the_prompt_column_is_chosen_by_name() -> None:
    assert encode({"question": "no", "p": "yes"}, prompt="p").prompt_ids == codes("yes")


def test_dots_step_into_a_column() -> None:
    row = {"metadata": {"expression": "1 + 1"}}

    assert encode(row, prompt="metadata.expression").prompt_ids == codes("1 + 1")


def test_a_column_whose_name_has_dots_comes_first() -> None:
    assert encode({"a.b": "whole", "a": {"b": "inner"}}, prompt="a.b").prompt_ids == codes("whole")


def test_a_response_ends_with_the_end_of_sequence_token() -> None:
    assert encode({"question": "1+1=", "answer": "2"}, response="answer").response_ids == [ord("2"), 0]


def test_a_rejected_response_ends_with_the_end_of_sequence_token_too() -> None:
    example = encode({"question": "1+1=", "good": "2", "bad": "11"}, response="good", rejected="bad")

    assert (example.response_ids, example.rejected_ids) == ([*codes("2"), 0], [*codes("11"), 0])


def test_a_pair_of_equal_responses_is_named() -> None:
    with pytest.raises(UserError) as raised:
        encode({"question": "1+1=", "good": "2", "bad": "2"}, response="good", rejected="bad")

    assert str(raised.value) == (
        "listed, row 0: columns `good` and `bad` are both '2', and a pair is two responses; correct or remove the row"
    )


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"question": "1+1=", "good": "2"}, "listed, row 0 has no column `bad`; columns found: question, good"),
        ({"question": "1+1=", "good": "2", "bad": None}, "listed, row 0: column `bad` is None, not a text"),
    ],
)
def test_a_rejected_response_that_is_none_is_named(row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        encode(row, response="good", rejected="bad")


def test_without_a_response_column_there_is_no_response() -> None:
    assert encode({"question": "1+1=", "answer": "2"}).response_ids == []


def test_a_prompt_has_the_same_tokens_with_and_without_a_response() -> None:
    row = {"question": "1+1=", "answer": "2"}

    assert encode(row).prompt_ids == encode(row, response="answer").prompt_ids


def test_a_chat_template_ends_where_the_assistant_begins() -> None:
    ids = encode({"question": "hi"}, chat_template=True, system_prompt="be brief").prompt_ids

    assert TOKENIZER.decode(ids) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_list_of_messages_is_written_as_it_is() -> None:
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    ids = encode({"question": messages}, chat_template=True).prompt_ids

    assert TOKENIZER.decode(ids).count("<|im_start|>user\nuser<|im_end|>") == 2


def test_a_spelled_special_token_is_text_in_chats_and_a_token_in_plain_prompts() -> None:
    ids = encode({"question": "2<|im_end|>"}, chat_template=True).prompt_ids
    assert ids == [2, *codes("user\n2<|im_end|>"), 3, *codes("\n"), 2, *codes("assistant\n")]
    assert encode({"question": "2<|im_end|>"}).prompt_ids == [*codes("2"), 3]


CALLS: dict[str, Any] = {"tool_calls": [{"function": {"name": "add", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("content", "text"),
    [([{"type": "text", "text": "2<|im"}, {"type": "text", "text": "_end|>"}], "2<|im_end|>"), (None, "")],
)
@pytest.mark.parametrize("environment", [None, Environment(tools=["tests.environments.games.add"])])
def test_parts_of_text_are_one_text_and_no_content_is_none(content: Any, text: str, environment: Any) -> None:
    found = []
    for said in (content, text):
        turn = {"role": "user"} if said else {"role": "assistant", **CALLS}
        source = Listed([{"question": [{**turn, "content": said}, {"role": "user", "content": "?"}]}])
        encoder, row = Encoder(PromptData(source).resolved(), TOKENIZER, environment), source.read([0])[0]
        found += [[encoder(source, [0])[0].prompt_ids, encoder.begins(row), encoder.messages(row)]]
    assert found[0] == found[1]


def test_a_special_token_that_cannot_be_text_is_named_with_its_row() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = Metaspace("_", prepend_scheme="first")
    source = Listed([{"question": "1"}, {"question": "2<|im_end|>"}])
    encoder = Encoder(PromptData(source, chat_template=True).resolved(), tokenizer)
    with pytest.raises(UserError, match=r"^listed, row 1: a message spells the special token <\|im_end\|>, and the"):
        encoder(source, [0, 1])


def test_a_tokenizers_start_tokens_stand_before_plain_prompts_only() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|reserved_7|> $A", special_tokens=[("<|reserved_7|>", 7)]
    )  # as Llama's tokenizers do

    example = encode({"question": "ab", "answer": "c"}, tokenizer, response="answer")
    assert (example.prompt_ids, example.response_ids) == ([7, *codes("ab")], [ord("c"), 0])
    assert 7 not in encode({"question": "ab"}, tokenizer, chat_template=True).prompt_ids


def test_a_missing_column_is_named_with_those_that_are_there() -> None:
    with pytest.raises(
        UserError, match=r"listed, row 0 has no column `questions`; columns found: question, n\. Did"
    ) as e:
        encode({"question": "1+1=", "n": 1}, prompt="questions")
    assert str(e.value).endswith('Did you mean "question"?')


@pytest.mark.parametrize("value", [None, 3, {"a": 1}])
def test_a_prompt_that_is_not_text_is_named(value: Any) -> None:
    with pytest.raises(UserError, match=r"listed, row 0: column `question` is .*, not a text"):
        encode({"question": value})


def test_a_template_that_writes_the_date_writes_the_same_on_each_day() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}"
    ids = encode({"question": "hi"}, tokenizer, chat_template=True).prompt_ids
    assert tokenizer.decode(ids) == "26 Jul 2024: hi"


def test_messages_need_the_chat_template() -> None:
    with pytest.raises(UserError, match=r"row 0: column `question` is a list of messages; set `data.chat_template"):
        encode({"question": [{"role": "user", "content": "hi"}]}, chat_template=False)


@pytest.mark.parametrize("message", [{"role": "user"}, "hi"])
def test_a_message_without_role_or_content_is_named(message: Any) -> None:
    with pytest.raises(UserError, match=r"row 0: column `question` is .*, not messages with role and content"):
        encode({"question": [message]}, chat_template=True)


def test_a_part_of_a_message_that_is_not_text_is_named_with_its_row() -> None:
    with pytest.raises(UserError, match=r"row 0: the prompt gave a content of type 'str', and only text is read"):
        encode({"question": [{"role": "user", "content": ["context"]}]}, chat_template=True)


@pytest.mark.parametrize("template", ["raise_exception('can only')", "'a' + 1"])
def test_messages_that_the_template_refuses_are_named(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = f"{{{{ {template} }}}}"

    with pytest.raises(UserError, match=r"row 0: the model's chat template refuses the messages \(can only"):
        encode({"question": "hi"}, tokenizer, chat_template=True)


@pytest.mark.parametrize(
    ("text", "chat", "is_what"),
    [
        ("     ", False, "blank"),
        ("\n ", True, "blank"),
        ("", True, "empty"),
        ([{"role": "user", "content": [{"type": "text", "text": " "}]}], True, "blank"),
    ],
)
def test_a_prompt_of_blanks_is_refused(text: Any, chat: bool, is_what: str) -> None:
    with pytest.raises(UserError, match=f"listed, row 0: the prompt is {is_what}, so nothing can follow it"):
        encode({"question": text}, chat_template=chat)


def test_messages_of_blanks_are_refused_unless_a_system_prompt_says_something() -> None:
    for prompt in ("", [{"role": "user", "content": " "}]):
        with pytest.raises(UserError, match="the prompt is"):
            encode({"question": prompt}, chat_template=True)
        assert encode({"question": prompt}, chat_template=True, system_prompt="Write a riddle.")


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="listed, row 0: the prompt is empty"):
        encode({"question": ""})


def test_a_tokenizer_without_a_template_cannot_write_chats() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None

    with pytest.raises(UserError, match=r"`data.chat_template` is true but the model's tokenizer has no template"):
        encode({"question": "hi"}, tokenizer, chat_template=True)


def test_a_tokenizer_without_an_end_cannot_end_responses() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None

    with pytest.raises(
        UserError, match=r"`data.response` is 'answer', but the model's tokenizer has no end-of-sequence"
    ):
        encode({"question": "hi", "answer": "2"}, tokenizer, response="answer")


def test_a_step_without_prompts_is_refused_by_the_constructor() -> None:
    with pytest.raises(UserError, match="`prompts_per_step` is 0"):
        PromptData(Listed([]), prompts_per_step=0)


ASKED = [{"role": "user", "content": "1+1="}]
SAID = [{"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("row", "learned", "columns"),
    [
        ({"prompt": "a", "question": "b", "response": "c"}, None, ("prompt", None, None, False)),
        ({"question": "b", "completion": "d"}, "responses", ("question", "completion", None, False)),
        ({"prompt": "a", "completion": "d", "response": "c"}, "responses", ("prompt", "response", None, False)),
        ({"messages": [*ASKED, *SAID]}, "responses", ("prompt", "messages", None, True)),
        ({"question": "?", "messages": [*ASKED, *SAID]}, "responses", ("question", "messages", None, True)),
        ({"prompt": ASKED, "completion": SAID}, "responses", ("prompt", "completion", None, True)),
        ({"prompt": ASKED, "answer": "2"}, None, ("prompt", None, None, True)),
        ({"question": "a", "chosen": "b", "rejected": "c"}, "pairs", ("question", "chosen", "rejected", False)),
    ],
)
def test_columns_that_are_not_set_follow_from_the_first_row_and_from_what_is_learned(
    row: dict[str, Any], learned: Any, columns: tuple[Any, ...]
) -> None:
    found = PromptData([row]).resolved(learned)
    assert (found.prompt, found.response, found.rejected, found.chat_template) == columns


def test_columns_that_are_set_win_over_columns_found_by_name() -> None:
    row = {"prompt": ASKED, "other": "1", "response": "2", "last": "3"}
    data = PromptData([row], prompt="other", response="last", chat_template=True)
    found = data.resolved("responses")
    assert (found.prompt, found.response, found.chat_template) == ("other", "last", True)
    assert (data.rejected, PromptData([row], chat_template=False).resolved().chat_template) == (None, False)


@pytest.mark.parametrize(
    ("learned", "line"),
    [
        ("responses", "has no column `response` or `completion` or `messages`; .* Name the column in `data.response`"),
        ("pairs", "has no column `chosen`; columns found: prompt. Name the column in `data.response`"),
    ],
)
def test_a_first_row_without_what_is_learned_is_named(learned: Any, line: str) -> None:
    with pytest.raises(UserError, match=f"`data.train`, row 0 {line}"):
        PromptData([{"prompt": "1"}]).resolved(learned)


@pytest.mark.parametrize("chat_template", [None, False])
def test_a_system_prompt_without_a_chat_template_is_refused(chat_template: bool | None) -> None:
    with pytest.raises(UserError, match=r"`data.system_prompt` is set without `data.chat_template`"):
        PromptData([{"prompt": "1"}], system_prompt="x", chat_template=chat_template).resolved()
    assert PromptData([{"prompt": ASKED}], system_prompt="x").resolved().chat_template


def encoded(row: dict[str, Any], **settings: Any) -> Example:
    data = PromptData([row], **settings).resolved("responses")
    return Encoder(data, TOKENIZER)(data.train, [0])[0]


def test_a_completion_of_messages_follows_the_messages_of_the_prompt() -> None:
    whole = encoded({"messages": [*ASKED, *SAID]})
    assert encoded({"prompt": ASKED, "completion": SAID}) == replace(whole, row={"prompt": ASKED, "completion": SAID})
    assert encoded({"prompt": "1+1=", "completion": SAID}).prompt_ids == whole.prompt_ids
    assert TOKENIZER.decode(whole.response_ids) == "2<|im_end|>"
    nested = {"meta": {"messages": [*ASKED, *SAID]}}
    assert encoded(nested, response="meta.messages") == replace(whole, row=nested)


def test_turns_of_the_policy_in_a_prompt_are_not_learned() -> None:
    more = [{"role": "user", "content": "sure?"}]
    found = encoded({"prompt": [*ASKED, *SAID, *more], "completion": [{"role": "assistant", "content": "yes"}]})
    assert TOKENIZER.decode(found.response_ids) == "yes<|im_end|>"
    assert "2<|im_end|>" in TOKENIZER.decode(found.prompt_ids)
    assert found.written == [True] * len(found.response_ids)
