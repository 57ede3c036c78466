"""`rlflow report`: shows where the time of a run went and what is unhealthy, or writes a page about whole runs."""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlflow.commands.parser import call, writing
from rlflow.commands.trace import chosen_steps, print_missing, traces_of
from rlflow.errors import UserError
from rlflow.loggers.jsonl import METRICS_FILE
from rlflow.loggers.trace import FLIGHT, SAVE, TURN, WAIT, missing_ranks, read_events, step_windows, window_of
from rlflow.metrics import straggler

PICTURE_FILE = "timeline.png"
PAGE_FILE = "report.html"
SUFFIXES = (".png", ".svg", ".pdf")


def report(
    run_dir: Path,
    /,
    *others: Path,
    step: int | None = None,
    steps: int = 3,
    draw: Path | None = None,
    html: bool = False,
    to: Path | None = None,
    watch: bool = False,
) -> None:
    """Show where the time of a run's steps went and which metrics are unhealthy; or write a page about whole runs.

    Only events of these steps are held in memory.

    Example:
        rlflow report runs/mine --html

    Args:
        run_dir: The folder of a run, whether it ended or not.
        others: Folders of other runs that the page compares with the first one.
        step: The last step shown, from 1; else the run's last.
        steps: Number of steps shown, up to `step`.
        draw: PATH.png, .svg or .pdf; else RUN_DIR/timeline.png.
        html: Write one HTML file that needs no network: health, curves, samples, timeline, graph, config.
        to: The HTML file; else RUN_DIR/report.html.
        watch: Serve the page on this machine's loopback instead, and renew it during the run; needs `--html`.

    Raises:
        UserError: The folder holds no traces, or not those of the step; or for a page no metrics.
    """
    if draw is not None and draw.suffix not in SUFFIXES:
        raise UserError(f"`--draw` is {str(draw)!r}; end it in one of {', '.join(SUFFIXES)}")
    if html:
        if draw is not None:
            raise UserError("`--draw` belongs to the report without a page; leave it out, or leave out `--html`")
        _page_of([run_dir, *others], step, steps, to or run_dir / PAGE_FILE, watch)
        return
    if others or watch or to is not None:
        what = f"{1 + len(others)} runs" if others else "`--watch`" if watch else "`--to`"
        raise UserError(f"{what} can only be given with `--html`; add it, or leave them out")
    traces = traces_of(run_dir)
    windows = step_windows(traces)
    shown = chosen_steps(run_dir, windows, step, steps)
    timeline = Timeline(spans(read_events(traces, window=window_of(windows, shown))))
    print("\n".join(screen(timeline, shown, last=max(windows))))
    print_missing(traces)
    picture = draw or run_dir / PICTURE_FILE
    with writing("draw"):
        draw_timeline(timeline, shown, picture)
    print("\n".join(["", *health(run_dir)]))
    print(f"drew {picture}")


def _page_of(folders: Sequence[Path], step: int | None, steps: int, file: Path, watch: bool) -> None:
    """Write the page of some runs, or serve it."""
    from rlflow.commands.report_server import open_server

    for folder in folders:
        if not (folder / METRICS_FILE).is_file():
            raise UserError(f"`{folder}` has no {METRICS_FILE}; give the folder of a run that began")
    if watch:
        with open_server(folders, lambda version: page_text(folders, step, steps, version)) as server:
            print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)", flush=True)
            server.serve_forever()
    made = page_text(folders, step, steps)
    with writing("to"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(made, encoding="utf-8")
    print(f"wrote {file}")


def page_text(folders: Sequence[Path], step: int | None, steps: int, version: str = "") -> str:
    """The page of some runs, see `report_page.page`; without a timeline if the first run has no traces."""
    from rlflow.commands.report_page import Traced, page

    try:
        traces = traces_of(folders[0])
        windows = step_windows(traces)
        shown = chosen_steps(folders[0], windows, step, steps)
        events = list(read_events(traces, window=window_of(windows, shown)))
        timeline = Timeline(spans(events))
        text = "\n".join(screen(timeline, shown, last=max(windows)))
        with tempfile.TemporaryDirectory() as scratch:
            picture = Path(scratch, PICTURE_FILE)
            draw_timeline(timeline, shown, picture)
            drawn = picture.read_bytes()
        traced = Traced(text, drawn, shown[-1], sent_bytes(events, shown[-1]), missing_ranks(traces))
    except UserError as error:
        traced = Traced(f"no timeline: {error}")
    return page(folders, traced, version)


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow report`."""
    call(report, arguments)


def screen(timeline: Timeline, steps: Sequence[int], last: int) -> Iterator[str]:
    """The report's lines.

    Args:
        timeline: Timeline of these steps at least.
        steps: Steps that are shown.
        last: Last step of the run.
    """
    start, end = timeline.window(steps)
    of_steps = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    yield f"{of_steps} of {last}, {len(timeline.ranks)} ranks: {end - start:.3f} s"
    yield ""
    yield f"    {'':<10} {'works':>7} {'waits':>7} {'idle':>7}"
    shares = {rank: timeline.shares(rank, start, end) for rank in timeline.ranks}
    shown = sorted(sorted(shares, key=lambda rank: -shares[rank][0])[:MOST_RANKS])
    for rank in shown:
        yield f"    {f'rank {rank}':<10}" + "".join(f" {share:7.1%}" for share in shares[rank])
    if len(shown) < len(shares):
        yield f"    ... and {len(shares) - len(shown)} ranks that worked less"
    for title, of in (("tasks", is_task), ("waits", is_wait)):
        if found := timeline.seconds(steps, of):
            yield ""
            yield f"    {f'{title}, seconds a step':<32} {'mean':>9} {'least':>20} {'most':>20}"
            yield from (_row(name, seconds) for name, seconds in found.items())
    yield ""
    for step in steps:
        if slowest := straggler(timeline.worked(step)):
            longest = timeline.ranks[int(slowest["time/straggler_rank"])]
            above = f"{slowest['time/straggler_share']:.1%} above the median"
            yield f"    step {step}: rank {longest} worked longest, {above}"


def health(run_dir: Path) -> Iterator[str]:
    """The lines about metrics outside their healthy range, as the page has them; or why there are none."""
    from rlflow.commands.report_page import ReportedRun

    try:
        found = ReportedRun(run_dir).unhealthy
    except UserError as error:
        yield f"metrics are not compared with their healthy ranges: {error}"
        return
    if not found:
        yield "all metrics that are compared with a range are within it"
        return
    yield f"{len(found)} metrics are outside their healthy range:"
    for each in found:
        yield f"    {each.metric}: {each.found}"
        yield f"        healthy: {each.healthy}; otherwise: {each.advice}"


def _row(name: str, seconds: dict[int, float]) -> str:
    taking = {rank: value for rank, value in seconds.items() if value}
    least, most = min(taking, key=lambda rank: taking[rank]), max(taking, key=lambda rank: taking[rank])
    mean = statistics.fmean(taking.values())
    ends = (f"{taking[rank]:.4f} (rank {rank})" for rank in (least, most))
    return f"    {name:<32} {mean:9.4f}" + "".join(f" {end:>20}" for end in ends)


# Tasks in which a rank does nothing but wait for the others.
WAITS = {WAIT, "Reduce", "BroadcastRows"}
EXCHANGE = "Exchange"
KINDS = {
    "Load": "load",
    "SyncWeights": "weight sync",
    "BroadcastRows": "broadcast",
    "Sleep": "sleep",
    EXCHANGE: "exchange",
    "Reduce": "reduce metrics",
    "Save": "save",
}


@dataclass(frozen=True)
class Span:
    """Work of a rank from `start` to `end`, in seconds from the run's first span.

    Attributes:
        rank: Rank that did it.
        name: A node's id, or what else was done.
        category: Category in the trace.
        step: Step of the run, from 1.
        start: Time when it began.
        end: Time when it ended.
    """

    rank: int
    name: str
    category: str
    step: int
    start: float
    end: float

    def within(self, start: float, end: float) -> float:
        """Seconds of the span between two times."""
        return max(0.0, min(self.end, end) - max(self.start, start))


@dataclass(frozen=True)
class Timeline:
    """All spans of a run."""

    spans: list[Span]

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks that left a span."""
        return sorted({span.rank for span in self.spans})

    @cached_property
    def tasks(self) -> list[Span]:
        """The spans of tasks, without waits and without spans that only repeat others."""
        return [span for span in self.spans if is_task(span)]

    def window(self, steps: Sequence[int]) -> tuple[float, float]:
        """The time from the beginning of the first task of these steps to the end of the last."""
        of = [span for span in self.tasks if span.step in steps]
        return min(span.start for span in of), max(span.end for span in of)

    def shares(self, rank: int, start: float, end: float) -> tuple[float, float, float]:
        """Shares of the time from `start` to `end` in which a rank worked, waited, and had nothing to do."""
        tasks = sum(span.within(start, end) for span in self.tasks if span.rank == rank)
        waited = sum(span.within(start, end) for span in self.spans if span.rank == rank and span.category in WAITS)
        whole = (end - start) or 1.0
        return (tasks - waited) / whole, waited / whole, 1 - tasks / whole

    def worked(self, step: int) -> list[float]:
        """Seconds that each rank worked in a step, waits not counted, by rank."""
        seconds = dict.fromkeys(self.ranks, 0.0)
        of_step = [span for span in self.spans if span.step == step]
        waits: dict[int, list[Span]] = {rank: [] for rank in self.ranks}
        for span in of_step:
            if span.category == WAIT:
                waits[span.rank].append(span)
        for task in of_step:
            if is_task(task) and task.category not in WAITS:
                inside = [wait for wait in waits[task.rank] if task.start <= wait.start and wait.end <= task.end]
                seconds[task.rank] += task.end - task.start - sum(wait.end - wait.start for wait in inside)
        return list(seconds.values())

    def seconds(self, steps: Sequence[int], of: Callable[[Span], bool]) -> dict[str, dict[int, float]]:
        """A step's mean seconds of spans, by name and rank."""
        found: dict[str, dict[int, float]] = defaultdict(lambda: dict.fromkeys(self.ranks, 0.0))
        for span in self.spans:
            if span.step in steps and of(span):
                found[span.name][span.rank] += (span.end - span.start) / len(steps)
        return dict(found)


def spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """The spans in a trace's events. A wait belongs to the step of its task, and a save to the step before it."""
    found: list[Span] = []
    begun: dict[str, float] = {}
    step, waits_until, rank = 1, 0.0, -1
    of_ranks = (event for event in events if "ts" in event and event["cat"] != TURN)
    # what lies in another comes after it
    for event in sorted(of_ranks, key=lambda event: (event["pid"], event["ts"], -event.get("dur", 0.0))):
        start, category = event["ts"] / 1e6, event["cat"]
        if event["pid"] != rank:
            rank, waits_until = event["pid"], 0.0
        if event["ph"] == "b":
            begun[event["id"]] = start
            continue
        if event["ph"] == "e":
            if event["id"] in begun:  # else it began before the steps that were read
                found.append(Span(rank, event["name"], category, step, begun.pop(event["id"]), start))
            continue
        end = start + event["dur"] / 1e6
        if category == WAIT and start < waits_until:
            continue  # a part of a wait
        if category in WAITS:
            waits_until = end
        if category not in (WAIT, SAVE):
            step = event["args"]["step"] + 1
        name = event["name"] if category == WAIT else _name(event["name"], category)
        found.append(Span(rank, name, category, step, start, end))
    return found


def sent_bytes(events: Iterable[dict[str, Any]], step: int) -> dict[str, int]:
    """Bytes that the ranks together sent to one another in each exchange of a step, by its line in the plan.

    Args:
        events: Events of a trace, those of this step among them.
        step: Step of the run, from 1.
    """
    sent: dict[str, int] = defaultdict(int)
    for event in events:
        if event.get("cat") == EXCHANGE and event["args"]["step"] + 1 == step and "bytes" in event["args"]:
            sent[event["name"]] += event["args"]["bytes"]  # a filter repeats exchanges
    return dict(sent)


def is_task(span: Span) -> bool:
    """Whether a span is a task of the plan: neither a wait within a task nor a repetition of other spans."""
    return span.category not in (WAIT, FLIGHT, "DynamicSampling")


def is_wait(span: Span) -> bool:
    """Whether a span is a wait for other ranks within a task."""
    return span.category == WAIT


def _name(task: str, category: str) -> str:
    """`run       rewards: ranks 0-1, ...` is `rewards`."""
    if category in KINDS:
        return KINDS[category]
    return task.partition(":")[0].split(maxsplit=1)[1] if category in ("RunNode", "TrainNode") else category


MOST_RANKS = 48  # that are drawn; of more, as many evenly spread


def draw_timeline(timeline: Timeline, steps: Sequence[int], path: Path) -> None:
    """Draw a row for each rank: tasks, with their waits in white, and a line of exchanges and early scores below."""
    # The object form with its own canvas: no window system, and no state shared with a user's own figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    start, end = timeline.window(steps)
    every = -(-len(timeline.ranks) // MOST_RANKS)
    rows = {rank: row for row, rank in enumerate(timeline.ranks[::every])}
    figure = Figure(figsize=(12.0, 1.8 + 0.45 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = [span for span in timeline.spans if span.rank in rows and span.within(start, end)]
    tasks = [span for span in shown if is_task(span)]
    names = dict.fromkeys(span.name for span in tasks)
    colours = {name: f"C{number}" for number, name in enumerate(names)}  # matplotlib's own, in turn
    for span in tasks:
        axes.barh(rows[span.rank], span.end - span.start, left=span.start - start, height=0.7, color=colours[span.name])
        if span.end - span.start > 0.07 * (end - start):
            middle = (span.start + span.end) / 2 - start
            axes.text(middle, rows[span.rank], span.name, ha="center", va="center", fontsize=7, clip_on=True)
    for span in shown:
        if span.category == WAIT:
            bar = (rows[span.rank], span.end - span.start, 0.7, span.start - start)
            axes.barh(*bar, color="white", alpha=0.75, hatch="////", edgecolor="#666666", linewidth=0)
        elif span.category == FLIGHT:
            ends = [span.start - start, span.end - start]
            axes.plot(ends, [rows[span.rank] + 0.42] * 2, color="#e45756", linewidth=2)
    _mark_steps(axes, timeline, steps, start)
    for name, colour in colours.items():
        axes.barh(0, 0, color=colour, label=name)
    axes.barh(0, 0, color="white", hatch="////", edgecolor="#666666", linewidth=0, label="waits")
    axes.set_yticks(list(rows.values()), [f"rank {rank}" for rank in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, end - start)
    axes.set_xlabel("seconds")
    figure.legend(ncols=min(8, len(colours) + 1), loc="outside lower center", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _mark_steps(axes: Any, timeline: Timeline, steps: Sequence[int], start: float) -> None:
    """A line where a step ends on its last rank, and the steps' numbers above."""
    ends = [start, *(timeline.window([step])[1] for step in steps)]
    for step, (begins, ended) in zip(steps, pairwise(ends), strict=True):
        axes.axvline(ended - start, color="black", linewidth=0.8, linestyle=":")
        axes.text((begins + ended) / 2 - start, -0.62, f"step {step}", ha="center", va="bottom", fontsize=8)
