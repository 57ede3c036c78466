"""A sample's conversation as text, for loggers and commands that show texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def transcript(messages: Sequence[Mapping[str, Any]]) -> str:
    """The conversation, a paragraph for each message, and why it is over; empty for a response that is one turn."""
    paragraphs = [f"{speaker(each)}: {text(each)}" for each in messages]
    ended = [f"({each['ended']})" for each in messages[-1:] if each.get("ended")]
    return "\n\n".join([*paragraphs, *ended])


def speaker(message: Mapping[str, Any]) -> str:
    """The speaker of a message: the role, with the name of a tool, and the reward of a policy's turn."""
    name = f" {message['name']}" if message.get("name") else ""
    reward = f", reward {message['reward']:g}" if "reward" in message else ""
    unread = ", which no turn reads" if "unread" in message else ""
    return f"{message['role']}{name}{reward}{unread}"


def text(message: Mapping[str, Any]) -> str:
    """The text of a message; a content in parts is shown as it is."""
    content = message["content"]
    return content if isinstance(content, str) else str(content)
