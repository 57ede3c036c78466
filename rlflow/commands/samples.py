"""`rlflow samples`: the samples that a run kept, to be read in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlflow.commands.parser import OneLineParser, parsed_options
from rlflow.commands.screen import Screen
from rlflow.errors import UserError, one_line
from rlflow.loggers.jsonl import SAMPLES_FILE, read_samples
from rlflow.loggers.transcript import speaker, text

Ended = Literal["done", "turns", "tokens", "failed"]
MOST_NAMED = 12  # steps in an error


@dataclass(frozen=True)
class Shown:
    """The samples of a run that are shown.

    Attributes:
        folder: The run's.
        step: Whose samples, from 1; None for those of all steps.
        last: Of the last step alone.
        row: The place in the dataset of their prompt; None for any.
        ended: Why they ended; None for any reason.
        reward_below: Above their rewards; None for any reward.
    """

    folder: Path
    step: int | None = None
    last: bool = False
    row: int | None = None
    ended: Ended | None = None
    reward_below: float | None = None

    def __post_init__(self) -> None:
        if self.step is not None and self.last:
            raise UserError(f"`--step` is {self.step} and `--last` is given; give one of them")

    def show(self) -> None:
        """Print them, one after another: a run's may be more than memory.

        Raises:
            UserError: There are none, or none of the step, or their file is damaged.
        """
        screen, seen, shown = Screen(), 0, 0
        for sample in self._of_steps():
            seen += 1
            try:
                if self._chosen(sample):
                    shown += 1
                    show(sample, screen)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise UserError(
                    f"{self.folder / SAMPLES_FILE} is damaged: of step {sample['step']} it has a sample that no run"
                    f" writes ({type(error).__name__}: {one_line(error)}); remove its line"
                ) from error
        if not shown:
            screen.line(f"none of {seen} samples is so")

    def _of_steps(self) -> Iterator[dict[str, Any]]:
        if not self.folder.is_dir():
            raise UserError(f"`{self.folder}` is no folder; give that of a run, such as runs/quickstart/grpo")
        if not (self.folder / SAMPLES_FILE).is_file():
            raise UserError(f"`{self.folder}` has no {SAMPLES_FILE}; give the folder of a run that generates")
        step, steps = self.step, dict.fromkeys(sample["step"] for sample in read_samples(self.folder))
        if not steps:
            raise UserError(f"`{self.folder}` has an empty {SAMPLES_FILE}: no step of the run scored a response yet")
        if self.last:
            step = max(steps)
        if step is not None and step not in steps:
            raise UserError(f"`--step` is {step}, and `{self.folder}` has samples of {_named(sorted(steps))}; give one")
        return (sample for sample in read_samples(self.folder) if step is None or sample["step"] == step)

    def _chosen(self, sample: Mapping[str, Any]) -> bool:
        return (
            (self.row is None or sample.get("row") == self.row)
            and (self.ended is None or sample.get("ended") == self.ended)
            and (self.reward_below is None or sample["reward"] < self.reward_below)
        )


def read_shown(arguments: Sequence[str]) -> Shown:
    """What `rlflow samples` shows."""
    parser = OneLineParser(
        prog="rlflow samples",
        description="Print the samples that a run kept: prompts and responses, or conversations turn by turn.",
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=str, help="the folder of a run, whether it ended or not")
    parser.add_argument("--step", type=int | None, default=None, help="of this step alone")
    parser.add_argument("--last", action="store_true", help="of the last step alone")
    parser.add_argument("--row", type=int | None, default=None, help="of this row of the dataset, from 0")
    parser.add_argument("--ended", type=Ended | None, default=None, help="that ended so")
    parser.add_argument("--reward-below", type=float | None, default=None, help="with a smaller reward")
    parsed = parsed_options(parser, arguments)
    return Shown(Path(parsed.run_dir), parsed.step, parsed.last, parsed.row, parsed.ended, parsed.reward_below)


def show(sample: Mapping[str, Any], screen: Screen) -> None:
    """Print a sample; of runs before there were turns, what there is."""
    parts = ", ".join(
        f"{name} {'-' if value is None else format(value, 'g')}" for name, value in sample["parts"].items()
    )
    facts = [f"step {sample['step']}"]
    facts += [f"{name} {sample[name]}" for name in ("row", "sample") if name in sample]
    facts += [f"reward {sample['reward']:g}" + (f" ({parts})" if parts else "")]
    facts += [f"the reward failed on it ({sample['failed']})"] if sample.get("failed") else []
    if messages := sample.get("messages"):
        facts.append("1 turn" if sample["turns"] == 1 else f"{sample['turns']} turns")
    if "ended" in sample:
        why = messages[-1].get("ended") if messages else ""
        facts.append(f"ended: {sample['ended']}" + (f", {why}" if why else ""))
    screen.line("  ".join(facts), "bold")
    if messages:
        if read := sample.get("read"):
            screen.block("read before the first turn", "", read)
            messages = said_after(messages, sample["turns"])
        for each in messages:
            name, _, more = speaker(each).partition(", ")
            screen.block(name, more, text(each))
    else:
        screen.block("prompt", "", sample["prompt"])
        screen.block("response", "", sample["response"])
    screen.line()


def said_after(messages: Sequence[Mapping[str, Any]], turns: int) -> Sequence[Mapping[str, Any]]:
    """What was said from the policy's first turn on: those of a prompt, examples among them, came before."""
    spoken = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
    return messages[spoken[-turns] :] if 0 < turns <= len(spoken) else messages


def _named(steps: Sequence[int]) -> str:
    """Steps as an error names them."""
    if len(steps) == 1:
        return f"step {steps[0]} alone"
    if steps[-1] - steps[0] == len(steps) - 1:
        return f"steps {steps[0]} to {steps[-1]}"
    named = [*map(str, steps[:MOST_NAMED])]
    return "steps " + ", ".join(named if len(steps) <= MOST_NAMED else [*named, "...", str(steps[-1])])
