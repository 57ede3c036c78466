"""Prompts that a template writes from rows. The tokenizer gives each character its code, so ids are read as text."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow.data.prompts import Encoder, PromptData
from rlflow.errors import UserError
from rlflow.models.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ROW = {"question": "1+1=", "answer": "2", "metadata": {"left": 1}}


def written(row: dict[str, Any], template: str, **settings: Any) -> str:
    (ids,) = Encoder(PromptData([row], **settings).resolved(), TOKENIZER).written([row], template)
    text: str = TOKENIZER.decode(ids)
    return text


def test_a_template_writes_the_prompt_and_columns_of_the_row() -> None:
    assert written(ROW, "{prompt} is {answer}, from {metadata.left}") == "1+1= is 2, from 1"
    assert written({**ROW, "p": "2-1="}, "{prompt}{question}", prompt="p") == "2-1=1+1="


def test_braces_are_written_twice_and_those_of_a_column_stay() -> None:
    assert written({**ROW, "answer": "{x}"}, "{{{answer}}}") == "{{x}}"


def test_a_template_applies_the_chat_template_and_system_prompt_of_the_dataset() -> None:
    chat = written(ROW, "{prompt}{answer}", chat_template=True, system_prompt="be brief")
    assert chat == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n1+1=2<|im_end|>\n<|im_start|>assistant\n"
    )


def test_of_messages_what_the_user_says_last_is_rewritten() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
    ]
    chat = written({"question": messages, "answer": "2"}, "{prompt}={answer}", chat_template=True)
    assert chat.split("<|im_start|>")[1:] == [
        "user\na<|im_end|>\n",
        "assistant\nb<|im_end|>\n",
        "user\nc=2<|im_end|>\n",
        "assistant\n",
    ]


def test_without_rows_there_are_no_prompts() -> None:
    assert Encoder(PromptData([{"prompt": "?"}]).resolved(), TOKENIZER).written([], "{prompt}") == []


def test_a_prompt_that_a_template_makes_too_long_is_refused() -> None:
    rows = [{"question": "ab"}, {"question": "abcd"}]
    encoder = Encoder(PromptData(rows, max_prompt_length=5).resolved(), TOKENIZER)
    assert [len(ids) for ids in encoder.written(rows, "{prompt}!")] == [3, 5]
    line = (
        r"^row 1 of those that a node writes prompts from: the prompt has 6 tokens, and `data.max_prompt_length` is 5,"
        " for which memory is planned; raise it, or write less$"
    )
    with pytest.raises(UserError, match=line):
        encoder.written(rows, "{prompt}!!")


@pytest.mark.parametrize(
    ("row", "template", "settings", "message"),
    [
        (ROW, "{prompt} {anwser}", {}, "row 0 of those that a node writes prompts from has no column `anwser`;"),
        (ROW, "{prompt} {}", {}, "the prompt template '{prompt} {}' has a place without a name; name a column in it"),
        (ROW, "{prompt", {}, "the prompt template '{prompt' cannot be read ("),
        ({**ROW, "question": None}, "{prompt}", {}, ": column `question` is None, not a text"),
        (
            {**ROW, "answer": None},
            "{answer}",
            {},
            "row 0 of those that a node writes prompts from: column `answer` is null, and the prompt template",
        ),
        (
            ROW,
            "{answer:.2f}",
            {},
            "row 0 of those that a node writes prompts from: the prompt template '{answer:.2f}' cann",
        ),
        (ROW, "{metadata:d}", {}, "cannot write column `metadata`, which is {'left': 1} (unsupported format string"),
        (ROW, "{answer!x}", {}, "cannot write column `answer`, which is '2' (Unknown conversion specifier x)"),
        ({**ROW, "answer": ""}, "{answer}", {}, ": the prompt is empty, so nothing can follow it"),
        (
            {"question": [{"role": "system", "content": "a"}]},
            "{prompt}",
            {"chat_template": True},
            ": no message of the prompt is the user's, into which a template writes; add one",
        ),
    ],
)
def test_a_prompt_that_cannot_be_written_is_refused_in_one_line(
    row: dict[str, Any], template: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        written(row, template, **settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
