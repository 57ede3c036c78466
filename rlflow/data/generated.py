"""Rows made by a generator instead of read from a file: problems of reasoning-gym, or what a function draws."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

from rlflow.data.pictures import portable
from rlflow.data.sources import Source
from rlflow.data.template import write_template
from rlflow.dotted_path import column_of, object_at
from rlflow.errors import UserError, one_line, require
from rlflow.rewards.answers import scorer_of

MOST_ANSWERS_DRAWN = 100  # answers of other problems, until one is wrong for this one

# The problems drawn last by what they were drawn from: those for training and those for validation are one draw.
_last_drawn: dict[str, list[dict[str, Any]]] = {}

DrawRow = Callable[[random.Random], dict[str, Any]]


@dataclass(eq=False)
class ReasoningGym(Source):
    """Problems of a reasoning-gym task, each question once. No problem is both in training and in validation.

    Give both splits the same `task`, `size`, `seed`, `validation_size` and `config`. A row is an entry of
    reasoning-gym, with `question`, `answer` and `metadata`. `ReasoningGymScore` scores it with the task's own scorer.
    A row of `chain_sum` has the question "State the final answer to the following arithmetic problem: 4 - 1 - 7 =", the
    answer "-4" and `metadata.expression` "4 - 1 - 7".

    Args:
        task: Name of the task, such as `chain_sum`.
        size: Number of problems drawn from the generator; a question that repeats is used once.
        seed: Seed of the draws, and of the choice of validation problems.
        split: Split that the rows are of: `train` or `validation`.
        validation_size: Number of problems reserved for validation, chosen at random from all problems.
        config: Settings of the task, such as `{max_terms: 2}`.
    """

    task: str
    size: int = 10_000
    seed: int = 0
    split: Literal["train", "validation"] = "train"
    validation_size: int = 200
    config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.validation_size < 0:
            raise UserError(f"`validation_size` is {self.validation_size}; give 0 or more problems")
        self.name = f"reasoning-gym {self.task}[{self.split}]"

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._problems[row]

    @cached_property
    def _problems(self) -> list[dict[str, Any]]:
        distinct = self._draw()
        if len(distinct) <= self.validation_size:
            raise UserError(
                f"reasoning-gym {self.task} gave {len(distinct)} distinct problems in {self.size} draws, no more than"
                f" `validation_size` {self.validation_size}; raise `size`, lower `validation_size` or widen `config`"
            )
        # Problems that are drawn often come first, so validation takes a random part and not the first one.
        random.Random(self.seed).shuffle(distinct)
        if self.split == "validation":
            return distinct[: self.validation_size]
        return distinct[self.validation_size :]

    def _draw(self) -> list[dict[str, Any]]:
        require("reasoning_gym", type(self).__name__, "tasks")
        import reasoning_gym

        score, config = scorer_of(self.task), self.config or {}
        # Problem i is drawn from seed + i, so neighbouring seeds would give nearly the same problems.
        first_seed = random.Random(self.seed).randrange(2**31)
        try:
            generator = reasoning_gym.create_dataset(self.task, seed=first_seed, size=self.size, **config)
        except (TypeError, AssertionError) as error:  # an unknown setting; a value out of range
            raise UserError(
                f"reasoning-gym {self.task} refuses `size` {self.size} with `config` {config} ({one_line(error)});"
                f" give what the documentation of {self.task} lists"
            ) from error
        first = generator[0]
        if score(first["answer"], _travelled(first)) != score(first["answer"], first):
            raise UserError(
                f"reasoning-gym {self.task} scores by Python objects that JSON does not carry, so its rows cannot"
                " travel between ranks; choose another `task`"
            )
        drawn = f"{self.task} {first_seed} {self.size} {sorted(config.items())}"
        if drawn not in _last_drawn:
            distinct: dict[str, dict[str, Any]] = {}
            for i in range(self.size):
                entry = generator[i]
                if entry["question"] not in distinct:
                    distinct[entry["question"]] = _travelled(entry)
            _last_drawn.clear()
            _last_drawn[drawn] = list(distinct.values())
        return [dict(problem) for problem in _last_drawn[drawn]]


class ReasoningGymPairs(ReasoningGym):
    """The problems of `ReasoningGym`, each with a wrong answer as well: for `response: answer, rejected: rejected`.

    The wrong answer is drawn from the answers to other problems that the task's own scorer scores lower. So a model
    that does not read the question cannot tell wrong answers from right ones. The arguments are those of
    `ReasoningGym`.
    """

    def _draw(self) -> list[dict[str, Any]]:
        problems, score = super()._draw(), scorer_of(self.task)
        answers = [problem["answer"] for problem in problems]
        draws = random.Random(f"{self.seed}/rejected")
        for problem in problems:
            right = score(problem["answer"], problem)
            drawn = (draws.choice(answers) for _ in range(MOST_ANSWERS_DRAWN))
            wrong = next((answer for answer in drawn if score(answer, problem) < right), None)
            if wrong is None:
                raise UserError(
                    f"reasoning-gym {self.task} has no wrong answer to {problem['question']!r:.60} among"
                    f" {MOST_ANSWERS_DRAWN} answers of other problems; choose another `task`, or widen `config`"
                )
            problem["rejected"] = wrong
        return problems


@dataclass(eq=False)
class ReasoningGymHints(ReasoningGym):
    """The problems of `ReasoningGym`, half of them with a hint, to teach a model to use hints: for `prompt: prompt`.

    The seed decides which problems have a hint. See `ReasoningGym` for the other arguments.

    Args:
        column: Column of the prompt without a hint; dots step into a column, as in `data.prompt`.
        hint: Text that replaces the prompt of a problem with a hint: a template as in `RLModule.prompts`.
    """

    column: str = "question"
    hint: str = "{prompt} {answer}"

    def _draw(self) -> list[dict[str, Any]]:
        problems, draws = super()._draw(), random.Random(f"{self.seed}/hints")
        for number, problem in enumerate(problems):
            place = f"{self.name}, problem {number}"
            plain = column_of(problem, self.column, place)
            problem["prompt"] = write_template(self.hint, plain, problem, place) if draws.random() < 0.5 else plain
        return problems


class RandomRows(Source):
    """Rows that a function draws. Each row depends only on the seed and on the row's number.

    Args:
        draw: Function, or its dotted path, that draws a row from a `random.Random`: a dict of the row's columns.
        size: Number of rows.
        seed: Seed of the draws.
    """

    def __init__(self, draw: str | DrawRow, size: int, seed: int = 0) -> None:
        self.draw = draw
        self.size = size
        self.seed = seed
        self.name = f"rows of {draw if isinstance(draw, str) else draw.__qualname__}"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict[str, Any]:
        return cast(dict[str, Any], portable(self._draw(random.Random(f"{self.seed}/{row}"))))

    @cached_property
    def _draw(self) -> DrawRow:
        return self.draw if callable(self.draw) else object_at(self.draw, f"`draw` is {self.draw!r}")


def _travelled(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry as another rank would receive it; all ranks score this one, so that they score alike."""
    return cast(dict[str, Any], json.loads(json.dumps(entry)))
