"""`rlflow trace`: the traces of a run's ranks as one, and which steps they hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from rlflow.commands.parser import call, writing
from rlflow.dag.tasks import rank_ranges
from rlflow.errors import UserError
from rlflow.loggers.trace import merge_traces, missing_ranks, step_windows, window_of
from rlflow.run.folder import RunFolder


def trace(
    run_dir: Path,
    /,
    to: Path | None = None,
    ranks: list[int] | None = None,
    step: int | None = None,
    steps: int | None = None,
) -> None:
    """Join the traces of a run's ranks into one file, for ui.perfetto.dev; print where it is and what is missing.

    Example:
        rlflow trace runs/mine --step 100 --steps 3

    Args:
        run_dir: The folder of a run, whether it ended or not.
        to: The file; else RUN_DIR/traces/trace.json.
        ranks: Ranks to join, such as [0,8]; else all.
        step: The last step in it, from 1; else the run's last.
        steps: Number of steps, up to `step`; else all.

    Raises:
        UserError: The folder holds no traces, or not those of a rank or step.
    """
    traces = traces_of(run_dir)
    for rank in ranks or ():
        if not (traces / f"rank{rank}.jsonl").is_file():
            raise UserError(f"`--ranks` names {rank}, and there is no {traces}/rank{rank}.jsonl; leave it out")
    window = None
    if step is not None or steps is not None:
        windows = step_windows(traces)
        window = window_of(windows, chosen_steps(run_dir, windows, step, steps))
    with writing("to"):
        merged = merge_traces(traces, to, ranks, window)
    print(f"wrote {merged} (ui.perfetto.dev)")
    print_missing(traces)


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow trace`."""
    call(trace, arguments)


def traces_of(folder: Path) -> Path:
    """The folder of a run's traces.

    Raises:
        UserError: There are none.
    """
    traces = RunFolder(folder).traces
    if not any(traces.glob("rank*.jsonl")):
        raise UserError(f"`{folder}` has no {traces.name}/rank*.jsonl; give the folder of a run that began")
    return traces


def print_missing(traces: Path) -> None:
    """Print what to do about ranks whose traces are on other machines."""
    if missing := missing_ranks(traces):
        print(
            f"without {rank_ranges(tuple(missing))}: each machine writes the traces of its own ranks, so where storage"
            f" is not shared copy theirs (rank*.jsonl) into {traces}"
        )


def chosen_steps(folder: Path, known: Collection[int], step: int | None, steps: int | None) -> list[int]:
    """The last `steps` steps, or all of them, up to `step`, or up to the run's last.

    Raises:
        UserError: There are none.
    """
    if steps is not None and steps < 1:
        raise UserError(f"`--steps` is {steps}; give 1 or more")
    if not known:
        raise UserError(
            f"the traces of `{folder}` hold no step: the run ended before its first task did; trace a run that"
            " takes a step"
        )
    last = max(known) if step is None else step
    if last not in known:
        raise UserError(
            f"`--step` is {last}, and `{folder}` has traces of steps {min(known)} to {max(known)}; give one of these"
        )
    first = min(known) if steps is None else last - steps + 1
    return sorted(each for each in known if first <= each <= last)
