"""Special tokens that an environment or a user spells are text to the model: nobody ends a turn but who speaks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers

from rlflow.environments.bridge import MARK, Bridge, SpecialTokens, date_for_template, message
from rlflow.environments.renderer_bridge import RendererBridge
from rlflow.environments.template_bridge import TemplateBridge
from rlflow.errors import UserError
from rlflow.models.tiny import tiny_tokenizer
from tests.environments.families import FAMILIES, SCHEMA, tokenizer_of

TEMPLATES = ["qwen2.5", "qwen3-coder", "llama-3", "mistral", "gpt-oss"]
RENDERERS = {"qwen3": {"name": "qwen3", "thinking_retention": "all"}, "llama-3": {"name": "llama-3"}}
BRIDGES: dict[tuple[str, str], Bridge] = {
    **{("template", each): TemplateBridge(tokenizer_of(each), [SCHEMA]) for each in TEMPLATES},
    **{("renderer", each): RendererBridge(tokenizer_of(each), RENDERERS[each], [SCHEMA], "tool") for each in RENDERERS},
}
PLAIN = "plain"  # in the place of what is spelled


def special(family: str, ids: list[int]) -> list[int]:
    return [each for each in ids if each in tokenizer_of(family).all_special_ids]


@pytest.mark.parametrize(("kind", "family"), BRIDGES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_special_tokens_spelled_in_a_message_are_text(kind: str, family: str, data: st.DataObject) -> None:
    """The special tokens of a prompt and of an answer are those of one without spellings, and the text is whole."""
    bridge, tokenizer = BRIDGES[kind, family], tokenizer_of(family)
    parts = st.sampled_from([*FAMILIES[family][0], "<|", "a", " ", MARK, "é"])
    said = "x" + "".join(data.draw(st.lists(parts, min_size=1, max_size=5))) + "y"
    spoken = [*tokenizer("a", add_special_tokens=False)["input_ids"], bridge.end]
    for words in (
        lambda content: bridge.begin([message("system", content), message("user", content)]),
        lambda content: bridge.after([message("tool", content, name="guess")], spoken, bridge.begin(ASKED)),
    ):
        ids, plain = words(said), words(PLAIN)
        assert special(family, ids) == special(family, plain)
        assert tokenizer.decode(ids) == tokenizer.decode(plain).replace(PLAIN, said)


ASKED = [message("user", "?")]


@pytest.mark.parametrize("family", TEMPLATES)
def test_text_without_a_spelling_has_the_tokens_that_it_always_had(family: str) -> None:
    tokenizer = tokenizer_of(family)
    said = [message("user", "so <|im_ end|> <tool_call> [/IN ST] x")]
    dated = date_for_template(tokenizer)
    written = tokenizer.apply_chat_template(said, tools=[SCHEMA], add_generation_prompt=True, tokenize=False, **dated)
    assert BRIDGES["template", family].begin(said) == tokenizer(written, add_special_tokens=False)["input_ids"]


def test_values_other_than_the_content_of_a_message_are_marked_too() -> None:
    more = {"ids": [1, None], "images": ["textures/a.png"], "by": {"text": "Ann"}}
    spelled = {"notes": [{"text": "<|im_end|>"}, "<|im_end|>"]}
    (said,) = SpecialTokens(tokenizer_of("qwen2.5")).marked([message("user", "?", **more, **spelled)])
    assert {name: said[name] for name in more} == more
    assert "<|im_end|>" not in str(said)


def test_a_turn_of_the_policy_in_a_prompt_keeps_its_special_tokens() -> None:
    said = [message("user", "?"), message("assistant", '<|python_tag|>{"name": "guess"}'), message("user", "?")]
    assert tokenizer_of("llama-3").convert_tokens_to_ids("<|python_tag|>") in TemplateBridge(
        tokenizer_of("llama-3")
    ).begin(said)


def test_the_embedded_tokenizer_reads_spellings_as_text() -> None:
    tokenizer = tiny_tokenizer()
    ids = TemplateBridge(tokenizer).begin([message("user", "a<|im_end|>b<|reserved_5|>")])
    assert ids == [2, *map(ord, "user\na<|im_end|>b<|reserved_5|>"), 3, 10, 2, *map(ord, "assistant\n")]


def test_a_spelling_within_another_is_text_too() -> None:
    ids = TemplateBridge(tiny_tokenizer()).begin([message("user", "<|im<|im_end|>_end|>")])
    assert ids == [2, *map(ord, "user\n<|im<|im_end|>_end|>"), 3, 10, 2, *map(ord, "assistant\n")]


def test_spaces_that_special_tokens_swallow_are_swallowed_next_to_spellings_too() -> None:
    tokenizer: Any = deepcopy(tokenizer_of("qwen2.5"))
    end = AddedToken("<|im_end|>", rstrip=True, special=True, normalized=False)
    tokenizer.add_tokens([end], special_tokens=True)
    special = SpecialTokens(tokenizer)
    (said,) = special.marked([message("user", "<|im_start|>")])
    whole, of_parts = special.ids("<|im_end|>  x"), special.ids(f"<|im_end|>  x{said['content']}")
    assert of_parts == [*whole, *map(ord, "<|im_start|>")] == [whole[0], *map(ord, "x<|im_start|>")]


def test_a_tokenizer_that_cannot_write_them_as_text_is_refused() -> None:
    tokenizer: Any = deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("_", prepend_scheme="first")  # of a text
    special = SpecialTokens(tokenizer)
    (said,) = special.marked([message("user", "a<|im_end|>b")])
    with pytest.raises(UserError, match=r"^a message spells the special token <\|im_end\|>, and the model's tokenizer"):
        special.ids(f"<|im_start|>{said['content']}<|im_start|>c")
