"""Small byte-level tokenizers with the special tokens and chat templates of families of models, made by hand."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from transformers import Qwen2Tokenizer

CALL = (
    "{% for call in message.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n{{ value }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}"
)
# Qwen3-Coder's, as far as messages, tools and calls go.
QWEN3_CODER = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for message in messages %}"
    "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}" + CALL + "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Mistral's of version 3: tools stand before the last message of the user, and ids have nine characters.
MISTRAL = (
    "<s>{% for message in messages %}"
    "{% if message.role == 'user' %}{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% if tools and message == asked[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ message.content }}[/INST]"
    "{% elif message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
    '{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ ", " if not loop.last }}{% endfor %}]</s>'
    "{% elif message.role == 'assistant' %} {{ message.content | trim }}</s>"
    "{% elif message.role == 'tool' %}{% if message.tool_call_id | length != 9 %}{{ raise_exception('length 9') }}"
    '{% endif %}[TOOL_RESULTS] {"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}'
    "[/TOOL_RESULTS]{% endif %}{% endfor %}"
)
CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
QWEN_WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
GLM_WORDS = (*QWEN_WORDS[:4], "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|end_of_text|>", "<|python_tag|>")
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
HARMONY = ("<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")
ROUND = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
# Of each family: its special tokens, that which ends a turn first; tokens that are none; and its template.
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "qwen2.5": (CHATML, QWEN_WORDS, "qwen2_5"),
    "qwen3": (CHATML, QWEN_WORDS, "qwen3"),
    "qwen3-coder": (CHATML, QWEN_WORDS, QWEN3_CODER),
    "llama-3": (("<|eot_id|>", "<|begin_of_text|>", *HEADERS), (), "llama3_1"),
    "glm-4.5": (GLM, GLM_WORDS, "glm4moe"),
    "gpt-oss": (HARMONY, (), "gptoss"),
    "mistral": (("</s>", "<s>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", *ROUND), (), MISTRAL),
}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "sure": {"type": "number"}},
            "required": ["word"],
        },
    },
}


@cache
def tokenizer_of(family: str) -> Any:
    """A tokenizer of all bytes and of a family's own tokens."""
    special, words, template = FAMILIES[family]
    tokens = [*_bytes(), "<unk>", *special, *words]
    tokenizer = Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[],
        unk_token="<unk>",
        eos_token=special[0],
        pad_token=special[-1],
        extra_special_tokens=list(special),
        chat_template=template if "{" in template else _template(template),
    )
    tokenizer.add_tokens(list(words))
    return tokenizer


def _template(name: str) -> str:
    """A family's chat template, which TRL's package has."""
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text()


def _bytes() -> list[str]:
    """The characters that byte-level vocabularies write for each byte."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + hidden.index(byte)) for byte in range(256)]
