"""Calls of tools in harmony, in which GPT-OSS speaks: messages with a header, which names a channel and who reads it.

    <|channel|>commentary to=functions.guess <|constrain|>json<|message|>{"word": "a"}<|call|>

A turn may think before, in `<|channel|>analysis<|message|>...<|end|><|start|>assistant`. The reader may stand before
the channel. The format: cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re

MARK = "<|channel|>"
FUNCTIONS = "functions."
_READER = re.compile(r"\bto=([^\s<]+)")
_END = re.compile(r"<\|(?:end|call|return)\|>")


def calls_in(text: str) -> list[tuple[str, str, str]]:
    """The name of each tool that is called in a turn, its arguments as they are written, and what is wrong with it."""
    found = []
    for message in text.split("<|start|>"):
        header, written, body = message.partition("<|message|>")
        reader = _READER.search(header)
        if reader is None:
            continue
        name = reader.group(1).removeprefix(FUNCTIONS)
        problem = ""
        if not written:
            problem = "this tool call has no <|message|>, behind which its arguments stand"
        elif not reader.group(1).startswith(FUNCTIONS):
            problem = f"there is no `{name}` to write to; tools are called by to={FUNCTIONS}NAME"
        elif not name:
            problem = f"this tool call names no tool; write to={FUNCTIONS}NAME"
        found.append((name, _END.split(body, maxsplit=1)[0], problem))
    return found
