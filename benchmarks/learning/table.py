"""Tables of the page: gains of runs, measurements of their gates, and TRL compared with rlflow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.learning.gates import ACCURACY, Gate, Run
from benchmarks.learning.runs import Task, curve, records, tenths

NOT_TRAINED = "not trained yet"  # in a line of what is not there


def write(page: Path, name: str, lines: Sequence[str]) -> None:
    """Put lines between the marks of that name; of what was not trained here the page keeps its lines."""
    lines = kept(lines, read(page, name))
    begin, end = f"<!-- table: {name} -->", f"<!-- end of {name} -->"
    text = page.read_text(encoding="utf-8")
    page.write_text("\n".join([text.split(begin)[0] + begin, *lines, end + text.split(end)[1]]), encoding="utf-8")


def read(page: Path, name: str) -> list[str]:
    """The lines between the marks of that name."""
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- table: {name} -->", f"<!-- end of {name} -->"
    return text.split(begin)[1].split(end)[0].strip("\n").split("\n")


def kept(lines: Sequence[str], before: Sequence[str]) -> list[str]:
    """The lines; in place of one that says that something is not trained, those of its name from before.

    Args:
        lines: A name in backquotes begins each but those of the head.
        before: Lines of the page.
    """
    known: dict[str, list[str]] = {}
    lines, (head, *rest) = list(lines), before
    for line in rest if head == lines[0] else ():  # under another head they would be other numbers
        known.setdefault(_name(line), []).append(line)
    chosen = (known.get(_name(line), [line]) if NOT_TRAINED in line else [line] for line in lines)
    return [line for of_name in chosen for line in of_name]


def _name(line: str) -> str:
    return line.partition("`")[2].partition("`")[0]


def of_gates(gates: dict[Task, tuple[Gate, ...]]) -> list[str]:
    """A line for each task: validation of each seed, its gain, and what else its gates measure."""
    names = list(dict.fromkeys(gate.name for each in gates.values() for gate in each if gate.name != "gain"))
    lines = [
        f"| config | steps | before | after | gain | {' | '.join(names)} | failed gates |",
        "|---|---|---|---|---|" + "---|" * (len(names) + 1),
    ]
    for task, of_task in gates.items():
        if not task.complete():
            lines.append(f"| `{called(task)}` | {NOT_TRAINED} |" + " |" * (len(names) + 4))
            continue
        runs = runs_of(task)
        starts, ends = zip(*(before_and_after(run) for run in runs), strict=True)
        gains = [after - before for before, after in zip(starts, ends, strict=True)]
        measured = {gate.name: each([gate.measure(run) for run in runs]) for gate in of_task}
        cells = [with_error(gains), *(measured.get(name, "") for name in names), failed_gates(of_task, runs)]
        lines.append(
            f"| `{called(task)}` | {int(runs[0][-1]['step'])} | {each(starts)} | {each(ends)} | {' | '.join(cells)} |"
        )
    return lines


def called(task: Task) -> str:
    """The name of a training in tables."""
    return task.name.removeprefix("learn/")


def failed_gates(gates: Iterable[Gate], runs: Sequence[Run]) -> str:
    """The names of the gates that a seed failed, or `none`."""
    return ", ".join(gate.name for gate in gates if not all(gate.passes(run) for run in runs)) or "none"


def of_both(ours: Sequence[Run], theirs: Sequence[Run], metrics: Iterable[str]) -> list[str]:
    """rlflow compared with TRL: mean over seeds of a metric late in training, with its standard error."""
    lines = ["| metric | rlflow | TRL | difference |", "|---|---|---|---|"]
    for metric in metrics:
        (mine, error), (other, their_error) = (last_tenth(runs, metric) for runs in (ours, theirs))
        apart = math.hypot(error, their_error)
        lines.append(
            f"| `{metric}` | {mine:.4f} ± {error:.4f} | {other:.4f} ± {their_error:.4f}"
            f" | {mine - other:+.4f} ± {apart:.4f} |"
        )
    return lines


def agree(ours: Sequence[Run], theirs: Sequence[Run], metric: str, most_apart: float) -> bool:
    """Whether the means over seeds differ by at most two standard errors, and by at most so much."""
    (mine, error), (other, their_error) = (last_tenth(runs, metric) for runs in (ours, theirs))
    return abs(mine - other) <= min(2 * math.hypot(error, their_error), most_apart)


def last_tenth(runs: Sequence[Run], metric: str) -> tuple[float, float]:
    """Mean over seeds of a metric late in training, and its standard error."""
    lasts = [tenths(run, metric)[1] for run in runs]
    return statistics.mean(lasts), standard_error(lasts)


def runs_of(task: Task) -> list[Run]:
    """The records of each seed."""
    return [records(task.folder(seed)) for seed in task.seeds]


def before_and_after(run: Run, metric: str = ACCURACY) -> tuple[float, float]:
    """The first and the last validation."""
    found = curve(run, metric)
    return found[0][1], found[-1][1]


def with_error(gains: Sequence[float]) -> str:
    """The mean gain, and its standard error where there are several."""
    mean = f"{statistics.mean(gains):+.3f}"
    return mean if len(gains) == 1 else f"{mean} ± {standard_error(gains):.3f}"


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean."""
    return max(statistics.stdev(values) / math.sqrt(len(values)), 1e-12)


def each(values: Iterable[float], format: Callable[[float], str] = "{:.3g}".format) -> str:
    """Seed by seed."""
    return ", ".join(map(format, values))
