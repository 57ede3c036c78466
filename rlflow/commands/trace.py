"""`rlflow trace`: the traces of a run's ranks as one, and which steps they hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlflow.commands.parser import OneLineParser, parsed_options
from rlflow.dag.tasks import rank_ranges
from rlflow.errors import UserError
from rlflow.loggers.trace import merge_traces, missing_ranks, step_windows, window_of
from rlflow.run.folder import RunFolder


@dataclass(frozen=True)
class MergedTrace:
    """The traces of a run's ranks, to be joined into one.

    Attributes:
        folder: The run's.
        to: The file; None for `traces/trace.json` in the folder.
        ranks: Of which it is made; None for all.
        step: The last step in it, from 1; None for the run's last.
        steps: How many, up to that one; None for all.
    """

    folder: Path
    to: Path | None = None
    ranks: Sequence[int] | None = None
    step: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise UserError(f"`--steps` is {self.steps}; give 1 or more")

    def write(self) -> None:
        """Join them, and print where they are and what is missing.

        Raises:
            UserError: The folder holds no traces, or not those of a rank or step.
        """
        traces = traces_of(self.folder)
        for rank in self.ranks or ():
            if not (traces / f"rank{rank}.jsonl").is_file():
                raise UserError(f"`--ranks` names {rank}, of which there is no {traces}/rank{rank}.jsonl; leave it out")
        window = None
        if self.step is not None or self.steps is not None:
            windows = step_windows(traces)
            chosen = chosen_steps(self.folder, windows, self.step, self.steps or len(windows))
            window = window_of(windows, chosen)
        ranks = None if self.ranks is None else frozenset(self.ranks)
        print(f"wrote {merge_traces(traces, self.to, ranks, window)} (ui.perfetto.dev)")
        for line in missing_lines(traces):
            print(line)


def read_trace(arguments: Sequence[str]) -> MergedTrace:
    """What `rlflow trace` joins."""
    parser = OneLineParser(
        prog="rlflow trace", description="Join the traces of a run's ranks, for ui.perfetto.dev.", allow_abbrev=False
    )
    parser.add_argument("run_dir", type=str, help="the folder of a run, whether it ended or not")
    parser.add_argument("--to", type=str | None, default=None, help="the file; else RUN_DIR/traces/trace.json")
    parser.add_argument("--ranks", type=list[int] | None, default=None, help="such as [0,8]; else all")
    parser.add_argument("--step", type=int | None, default=None, help="the last step in it; else the run's last")
    parser.add_argument("--steps", type=int | None, default=None, help="how many, up to that one; else all")
    parsed = parsed_options(parser, arguments)
    to = None if parsed.to is None else Path(parsed.to)
    return MergedTrace(Path(parsed.run_dir), to, parsed.ranks, parsed.step, parsed.steps)


def traces_of(folder: Path) -> Path:
    """Where the traces of a run lie.

    Raises:
        UserError: There are none.
    """
    traces = RunFolder(folder).traces
    if not any(traces.glob("rank*.jsonl")):
        raise UserError(f"`{folder}` has no {traces.name}/rank*.jsonl; give the folder of a run that began")
    return traces


def missing_lines(traces: Path) -> Iterator[str]:
    """What to do about ranks whose traces are on other machines."""
    missing = missing_ranks(traces)
    if missing:
        yield (
            f"without {rank_ranges(tuple(missing))}: each machine writes the traces of its own ranks, so where storage"
            f" is not shared copy theirs (rank*.jsonl) into {traces}"
        )


def chosen_steps(folder: Path, known: Collection[int], step: int | None, steps: int) -> list[int]:
    """The last `steps` steps up to `step`, or up to the run's last.

    Raises:
        UserError: There are none.
    """
    if not known:
        raise UserError(f"the traces of `{folder}` hold no step: the run ended before its first task did")
    last = max(known) if step is None else step
    if last not in known:
        raise UserError(f"`--step` is {last}, and `{folder}` has traces of steps {min(known)} to {max(known)}")
    return sorted(each for each in known if last - steps < each <= last)
