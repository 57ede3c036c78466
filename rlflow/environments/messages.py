"""Messages of a conversation, as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.errors import UserError

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")


def message(role: str, content: str, **more: Any) -> Message:
    """A message of a text."""
    return {"role": role, "content": content, **more}


def checked(given: Any, where: str) -> list[Message]:
    """What an environment gave, as messages: a text is one of the user's; None is none.

    A content may be a list of parts, `{"type": "text", "text": ...}`; only text is read.

    Raises:
        UserError: It is neither, or has a role or a part that no template knows.
    """
    if given is None:
        return []
    if isinstance(given, str):
        return [message("user", given)]
    messages = [given] if isinstance(given, Mapping) else given
    if not isinstance(messages, Sequence):
        raise UserError(f"{where} gave {given!r:.60}; give a text, or messages with `role` and `content`")
    return [_checked(each, where) for each in messages]


def _checked(given: Any, where: str) -> Message:
    if not isinstance(given, Mapping) or not {"role", "content"} <= given.keys():
        raise UserError(f"{where} gave {given!r:.60} as a message; give a mapping with `role` and `content`")
    if given["role"] not in ROLES or given["role"] == "assistant":
        raise UserError(
            f"{where} gave a message of role {given['role']!r}; an environment speaks as user, tool or system"
        )
    return {**given, "content": text_of(given["content"], where)}


def text_of(content: Any, where: str) -> str:
    """The text of a content: itself, or that of its parts, one after another."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else [content]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UserError(f"{where} gave a content of type {kind!r}, and only text is read; give parts of type text")
        if not isinstance(part.get("text"), str):
            raise UserError(f"{where} gave the part {part!r:.60}, which has no text; give it one under `text`")
    return "".join(part["text"] for part in parts)
