"""`rlflow samples`: the samples that a run stored, to be read in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlflow.commands.parser import call
from rlflow.commands.screen import Screen
from rlflow.errors import UserError, one_line
from rlflow.loggers.jsonl import SAMPLES_FILE, read_samples
from rlflow.loggers.transcript import speaker, text

Ended = Literal["done", "turns", "tokens", "failed"]


def samples(
    run_dir: Path,
    /,
    step: int | None = None,
    last: bool = False,
    row: int | None = None,
    ended: Ended | None = None,
    reward_below: float | None = None,
) -> None:
    """Print the samples that a run stored: prompts and responses, or conversations turn by turn.

    They are read one after another, as a run may have more of them than fit in memory.

    Example:
        rlflow samples runs/mine --last

    Args:
        run_dir: The folder of a run, whether it ended or not.
        step: Print only samples of this step, from 1.
        last: Print only samples of the last step.
        row: Print only samples of this row of the dataset, from 0.
        ended: Print only samples that ended in this way.
        reward_below: Print only samples with a smaller reward.

    Raises:
        UserError: There are none, or none of the step, or their file is damaged.
    """
    if step is not None and last:
        raise UserError(f"`--step` is {step} and `--last` is given; give one of them")
    wanted = {name: value for name, value in (("row", row), ("ended", ended)) if value is not None}
    screen, seen, shown = Screen(), 0, 0
    for sample in _of_steps(run_dir, step, last):
        seen += 1
        try:
            if all(sample.get(name) == value for name, value in wanted.items()) and (
                reward_below is None or sample["reward"] < reward_below
            ):
                shown += 1
                show(sample, screen)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{run_dir / SAMPLES_FILE} is damaged: of step {sample['step']} it has a sample that no run writes"
                f" ({type(error).__name__}: {one_line(error)}); remove its line"
            ) from error
    if not shown:
        screen.line(f"none of {seen} samples is so")


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow samples`."""
    call(samples, arguments)


def _of_steps(folder: Path, step: int | None, last: bool) -> Iterator[dict[str, Any]]:
    """The samples of a step, of the last one, or of all."""
    if not folder.is_dir():
        raise UserError(f"`{folder}` is not a folder; give that of a run, such as runs/quickstart/grpo")
    if not (folder / SAMPLES_FILE).is_file():
        raise UserError(f"`{folder}` has no {SAMPLES_FILE}; give the folder of a run that generates")
    steps = dict.fromkeys(sample["step"] for sample in read_samples(folder))
    if not steps:
        raise UserError(
            f"`{folder}` has an empty {SAMPLES_FILE}: no step of the run has scored a response yet; wait for one"
        )
    if last:
        step = max(steps)
    if step is not None and step not in steps:
        nearest = sorted(steps, key=lambda each: abs(each - step))[:3]
        raise UserError(f"`--step` is {step}, and `{folder}` has no samples of it; the nearest steps are {nearest}")
    return (sample for sample in read_samples(folder) if step is None or sample["step"] == step)


def show(sample: Mapping[str, Any], screen: Screen) -> None:
    """Print a sample."""
    parts = ", ".join(
        f"{name} {'-' if value is None else format(value, 'g')}" for name, value in sample["parts"].items()
    )
    messages, ended = sample["messages"], sample["ended"]
    why = messages[-1].get("ended") if messages else ""
    facts = [f"step {sample['step']}", f"row {sample['row']}", f"sample {sample.get('path', sample['sample'])}"]
    if begins := sample.get("continues"):
        facts.append(f"begins with {begins['tokens']} tokens of sample {begins['sample']}")
    elif first := sample.get("episode"):
        facts.append(f"of the episode of sample {first}")
    facts += [f"reward {sample['reward']:g}" + (f" ({parts})" if parts else "")]
    facts += [f"the reward failed on it ({sample['failed']})"] if sample.get("failed") else []
    if messages:
        facts.append("1 turn" if sample["turns"] == 1 else f"{sample['turns']} turns")
    facts.append(f"ended: {ended}" + (f", {why}" if why else ""))
    facts += [f"images: {', '.join(sample['pictures'])}"] if sample.get("pictures") else []
    screen.line("  ".join(facts), "bold")
    if messages:
        if read := sample.get("read"):
            screen.block("read before the first turn", "", read)
            messages = without_prompt(messages, sample["turns"])
        for each in messages:
            name, _, more = speaker(each).partition(", ")
            screen.block(name, more, text(each))
    else:
        screen.block("prompt", "", sample["prompt"])
        screen.block("response", "", sample["response"])
    screen.line()


def without_prompt(messages: Sequence[Mapping[str, Any]], turns: int) -> Sequence[Mapping[str, Any]]:
    """The messages from the policy's first turn on, without those of the prompt, which may be examples."""
    spoken = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
    return messages[spoken[-turns] :] if 0 < turns <= len(spoken) else messages
