"""Sums with a calculator: the rows, the tool, one that fails, and whose conversations the model is taught.

`agent_sft.yaml`, `agent_calculator.yaml`, `agent_failing_tool.yaml` and `agent_harness_sft.yaml` name what is here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlflow.data import Source

FAILS = 0.2
INSTRUCTIONS = (
    "Answer with the sum alone.",
    "Add the two numbers.",
    "You are a calculator. Give a number and no words.",
)


class Sums(Source):
    """Sums of two numbers, such as `7+8`; those of the two splits differ.

    Args:
        size: Number of sums.
        digits: Number of digits of each number.
        seed: Seed of the draws.
        split: Part of the sums; one in five is for validation.
    """

    def __init__(
        self, size: int, digits: int = 1, seed: int = 0, split: Literal["train", "validation"] = "train"
    ) -> None:
        self.size = size
        self.digits = digits
        self.seed = seed
        self.split = split
        self.name = f"sums[{split}]"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict[str, Any]:
        name = f"{self.split}/{self.seed}/{row}"
        draws = random.Random(name)
        while True:
            a, b = (draws.randrange(10 ** (self.digits - 1), 10**self.digits) for _ in range(2))
            if (random.Random(f"{a}+{b}").random() < 0.2) == (self.split == "validation"):
                return {"row": name, "question": f"{a}+{b}", "a": a, "b": b, "answer": str(a + b)}


class InstructedSums(Sums):
    """The same with a column `asked`, the messages of the prompt: half of them begin with instructions."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        found = super().__getitem__(row)
        draws = random.Random(f"instructions of {found['row']}")
        asked = [{"role": "user", "content": found["question"]}]
        if draws.random() < 0.5:
            asked.insert(0, {"role": "system", "content": draws.choice(INSTRUCTIONS)})
        return {**found, "asked": asked}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


class FailingCalculator:
    """The same tool; one call in five fails. Which ones follows from the row and the number of the call."""

    def reset(self, row: str) -> None:
        self._draws = random.Random(f"failures of {row}")

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        if self._draws.random() < FAILS:
            raise TimeoutError("busy")
        return add(a, b)


def unsure(messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], draws: random.Random) -> str:
    """A script that calls the tool every other time, and again every other time where it failed; else it guesses."""
    last = messages[-1]
    if last["role"] == "tool" and last["content"].isdecimal():
        return str(last["content"])
    if draws.random() < 0.5:
        call = {"name": "add", "arguments": {"a": row["a"], "b": row["b"]}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"
    return str(draws.randint(2, 2 * max(row["a"], row["b"])))
