"""`Rubric`, what a language model is asked of a response, and how its grades are read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from rlflow.errors import UserError, did_you_mean

PROMPT = """You grade an answer to a task.

Task:
{question}

Answer:
{response}
{criteria}
Say in a sentence or two what is right and wrong about it. Then give JSON on the last line, with nothing after it:
{form}"""

_FIELD = re.compile(r"\{(\w+)\}")


class Rubric:
    """Grades on a scale of whole numbers, which models keep to better than fractions; a score is a share of the scale.

    Args:
        criteria: What counts, by name, each in words. None for one grade of the whole.
        weights: Of the criteria, whose weighted mean is the score; None for all alike.
        scale: The best grade; the worst is 0.
        prompt: What the judge is asked. `{response}`, `{criteria}`, `{form}` and columns of the row stand in braces.
    """

    def __init__(
        self,
        criteria: dict[str, str] | None = None,
        weights: dict[str, float] | None = None,
        scale: int = 10,
        prompt: str = PROMPT,
    ) -> None:
        self.criteria = criteria or {}
        self.weights = weights or dict.fromkeys(self.criteria, 1.0)
        if self.weights.keys() != self.criteria.keys():
            other = sorted(self.weights.keys() ^ self.criteria.keys())[0]
            raise UserError(f"`criteria` and `weights` name different things, `{other}` in one alone; name the same")
        if self.criteria and not sum(self.weights.values()) > 0:
            raise UserError(f"`weights` are {self.weights}, whose sum is not above 0; give positive ones")
        if scale < 1:
            raise UserError(f"`scale` is {scale}; give the best grade, 1 or more")
        if "{response}" not in prompt:
            raise UserError("`prompt` does not say where the response stands; write {response} in it")
        self.scale = scale
        self.prompt = prompt

    @property
    def names(self) -> list[str]:
        """Of the grades."""
        return list(self.criteria) or ["score"]

    @property
    def columns(self) -> list[str]:
        """Of the row, which stand in the prompt."""
        return [name for name in _FIELD.findall(self.prompt) if name not in ("response", "form", "criteria")]

    def question(self, text: str, row: Mapping[str, Any]) -> str:
        """What the judge is asked of a response to this row of the dataset.

        Raises:
            UserError: The row lacks a column that stands in the prompt.
        """
        form = json.dumps(dict.fromkeys(self.names, f"0 to {self.scale}"))
        listed = "".join(f"- {name}: {words}\n" for name, words in self.criteria.items())
        given = {"response": text, "form": form, "criteria": f"\nWhat counts:\n{listed}" if listed else ""}

        def value(match: re.Match[str]) -> str:
            name = match.group(1)
            if name not in given and name not in row:
                raise UserError(
                    f"`prompt` speaks of {{{name}}}, and the row has no such column (it has {', '.join(row)})."
                    f"{did_you_mean(name, row)}"
                )
            return given[name] if name in given else str(row[name])

        return _FIELD.sub(value, self.prompt)

    def shares(self, said: str) -> dict[str, float]:
        """The grades in what a judge said, by name, from 0 to 1; none where one is missing or out of the scale."""
        return {name: grade / self.scale for name, grade in grades_in(said, self.names, self.scale).items()}

    def score(self, shares: Mapping[str, float]) -> float:
        """Of all of them together: their weighted mean."""
        if not self.criteria:
            return shares["score"]
        whole = sum(self.weights.values())
        return sum(self.weights[name] / whole * share for name, share in shares.items())


def grades_in(said: str, names: list[str], scale: int) -> dict[str, float]:
    """The grades of all names in the last JSON object of a text; none where one is missing or out of the scale.

    Where objects stand in one another, the outermost counts that has all names.
    """
    last, around = -1, []
    for start in reversed([match.start() for match in re.finditer(r"\{", said)]):
        try:
            found, end = json.JSONDecoder().raw_decode(said, start)
        except ValueError:
            continue
        except RecursionError:
            break
        last = start if last < 0 else last
        if end > last:
            around.append(found)
    for found in reversed(around):
        if all(name in found for name in names):
            grades = {name: _number(found[name]) for name in names}
            return grades if all(0 <= grade <= scale for grade in grades.values()) else {}
    return {}


def _number(value: Any) -> float:
    """NaN, which lies in no scale, for what is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
