"""Output of commands for people: with colours on a terminal that has them, wrapped to its width."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from rich.console import Console
from rich.text import Text

from rlflow.errors import readable

INDENT = "  "
COLOURS = {"system": "magenta", "user": "cyan", "prompt": "cyan", "assistant": "green", "response": "green"}
COLOURS |= {"tool": "yellow", "policy": "green", "environment": "cyan"}


class Screen:
    """Standard output. In a pipe, and where `NO_COLOR` is set, without colours; in a pipe lines are not wrapped.

    Texts of models and datasets cannot control the terminal: a control character is shown as Python writes it.
    """

    def __init__(self) -> None:
        self._console = _Console(file=sys.stdout, highlight=False, markup=False, emoji=False)

    def line(self, text: str = "", style: str = "") -> None:
        """Write a line."""
        self._write(Text(readable(text), style), "")

    def block(self, speaker: str, more: str, text: str) -> None:
        """Write a text, indented below a line that names its speaker.

        Args:
            speaker: Name of the speaker; its first word chooses the colour.
            more: Text next to the name.
            text: Text to write, any number of lines.
        """
        colour = COLOURS.get(speaker.partition(" ")[0], "")
        head = Text(INDENT + readable(speaker), f"bold {colour}".strip())
        self._write(head.append(f"  {readable(more)}" if more else "", "not bold dim"), "")
        for line in readable(text).split("\n"):
            self._write(Text(line, colour), 2 * INDENT)

    def _write(self, text: Text, indent: str) -> None:
        width = self._console.width - len(indent)
        lines = text.wrap(self._console, width) if self._console.is_terminal and text else [text]
        for line in lines:
            line.rstrip()
            self._console.print(Text(indent if line else "").append_text(line), soft_wrap=True)


class _Console(Console):
    """A console whose reader may close the pipe early, as `head` does."""

    def on_broken_pipe(self) -> NoReturn:
        """End the command well; what Python still holds back goes nowhere."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)
