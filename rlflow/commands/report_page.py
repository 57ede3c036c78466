"""`rlflow report --html`: runs as one page that needs no network, to be looked at, searched and sent to others."""

from __future__ import annotations

import base64
import hashlib
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from rlflow.commands.configuration import Configured
from rlflow.commands.fit import read_fit
from rlflow.commands.replay import config_of
from rlflow.commands.report_charts import Curve, chart, graph_drawing, in_bytes
from rlflow.commands.report_health import MetricsLine, Unhealthy, findings
from rlflow.commands.report_pictures import MOST_BYTES as MOST_PICTURE_BYTES
from rlflow.commands.report_pictures import SIDE, PagePictures
from rlflow.dag.tasks import rank_ranges
from rlflow.data.mixture import settings_of
from rlflow.data.prompts import PromptData
from rlflow.errors import UserError, one_line
from rlflow.loggers.jsonl import SAMPLES_FILE, read_metrics, read_samples
from rlflow.loggers.secrets import without_secrets
from rlflow.run.prepare import plan_run
from rlflow.settings import VALIDATION

MOST_BYTES = 2_000_000  # of the samples of all runs, as JSON
MOST_SAMPLES = 400  # of a run
MOST_REPEATED = 8  # prompts that come in several steps, all of their samples chosen
MOST_CHARACTERS = 20_000  # of a text of a sample, where the samples are cut
PANELS: dict[str, tuple[str, ...]] = {  # metrics by title; `*/kl` is of any model
    "Reward": ("reward/mean", "greedy_reward/mean", "best/reward"),
    "Parts of the reward": ("reward/*",),
    "Validation: accuracy": ("val/accuracy", "val_greedy/accuracy"),
    "Validation: reward": ("val/reward", "val_greedy/reward"),
    "Validation: pass@k": ("val/pass@*",),
    "Validation: loss, margin": ("val/loss", "val/margin"),
    "Loss": ("*/loss",),
    "Length of responses, tokens": ("rollout/length", "val/length"),
    "Share of cut responses": ("rollout/truncated", "val/truncated"),
    "KL to the reference": ("*/kl", "*/teacher_kl"),
    "Entropy": ("*/entropy",),
    "Share of clipped tokens": ("*/clip_fraction",),
    "Share of samples in groups of equal rewards": (),
    "Gap of log-probabilities, engine to trainer": ("sync/logprob_gap", "sync/logprob_gap_uncertain"),
    "Gradient norm": ("*/grad_norm",),
    "Turns and tool calls": ("rollout/turns", "rollout/tool_calls"),
    "Seconds of a step": ("time/step",),
    "Tokens per second": (),
    "Bytes between ranks in a step": ("exchange/bytes",),
}
NOT_PARTS = ("reward/mean", "reward/errors", "reward/outcome")


@dataclass(frozen=True)
class ReportedRun:
    """The contents of a run's folder."""

    folder: Path

    @cached_property
    def lines(self) -> Sequence[MetricsLine]:
        """The metrics of its steps."""
        return read_metrics(self.folder)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config without secrets; empty for a run that was started from Python."""
        file = self.folder / "config.yaml"
        found: dict[str, Any] = without_secrets(config_of(file)) if file.is_file() else {}
        return found

    @property
    def unhealthy(self) -> list[Unhealthy]:
        """The metrics outside their healthy range, see `report_health.findings`."""
        placed = (self.config.get("placement") or {}).values()
        # A placement without ranks only says how the ranks divide the role.
        apart = any(not isinstance(each, Mapping) or each.get("ranks") is not None for each in placed)
        return list(findings(self.lines, apart))

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Summary of the run; empty until the run has ended.

        Raises:
            UserError: The file is damaged.
        """
        file = self.folder / "summary.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except ValueError as error:
            raise UserError(f"`{file}` is damaged ({error}); move it away, and report the run without it") from error
        if not isinstance(found, dict):
            raise UserError(f"`{file}` is damaged (no object); move it away, and report the run without it")
        return found

    @cached_property
    def configured(self) -> Configured:
        """The objects of its config.

        Raises:
            UserError: It has none, or one that cannot be read here, as where the algorithm's own file is elsewhere.
        """
        file = self.folder / "config.yaml"
        if not file.is_file():
            raise UserError("the run was started from Python and has no config.yaml")
        try:
            return read_fit(["--config", str(file)])
        except UserError as error:
            raise UserError(f"{one_line(error)}. Start the command where the run was started") from error

    def points(self, metric: str) -> list[tuple[float, float]]:
        """Step and value of each finite record of a metric."""
        return [(line["step"] or 0, value) for line in self.lines if (value := line.get(metric)) is not None]


@dataclass(frozen=True)
class Traced:
    """A summary of a run's traces.

    Attributes:
        timeline: Text of the timeline, or why there is none.
        picture: PNG of the timeline; empty for none.
        step: The step whose exchanges were counted, from 1.
        sent: Bytes that the ranks together sent in each exchange of that step, by its line in the plan.
        missing: Ranks without traces here.
    """

    timeline: str
    picture: bytes = b""
    step: int = 0
    sent: Mapping[str, int] = field(default_factory=dict)
    missing: Sequence[int] = ()


def page(folders: Sequence[Path], traced: Traced, version: str = "") -> str:
    """The page of some runs.

    Args:
        folders: Folders of the runs; the first one is shown with its timeline and graph.
        traced: Summary of the first run's traces.
        version: Version of the page that the server gives until there is a newer one; empty for a file.

    Raises:
        UserError: A folder has no metrics, or a damaged file.
    """
    runs = [ReportedRun(folder) for folder in folders]
    names = _names(folders)
    samples, note = chosen_samples(runs)
    pictures, about_pictures = with_pictures(runs, samples)
    script = (Path(__file__).with_suffix(".js")).read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    connects = "'self'" if version else "'none'"
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}';"
        f" connect-src {connects}; base-uri 'none'; form-action 'none'"
    )
    title = f"rlflow: {', '.join(names)}"
    image = ""
    if traced.picture:
        encoded = base64.b64encode(traced.picture).decode()
        image = f'<div class="wide"><img alt="timeline of ranks and nodes" src="data:image/png;base64,{encoded}"></div>'
    block = _as_json({"runs": names, "samples": samples, "pictures": pictures})
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{Path(__file__).with_suffix('.css').read_text(encoding='utf-8')}</style></head>",
            f'<body data-version="{escape(version)}"><h1>{escape(title)}</h1>',
            *(['<p id="newer" hidden><b>The run went on: load the page again to see it.</b></p>'] if version else []),
            *_overview(runs, names),
            "<h2>Is it healthy?</h2>",
            *_health(runs, names),
            "<h2>Curves</h2>",
            '<p class="faint">Of long runs a curve has the smallest and largest value of each of 200 parts. Bands are'
            " 95% intervals over the held-out prompts (Wilson), where the run has ended and so wrote how many there"
            " are.</p>",
            f'<div class="charts">{"".join(_charts(runs, names))}</div>',
            f"<h2>Where the time went{escape(f': {names[0]}' if len(runs) > 1 else '')}</h2>",
            image,
            f"<pre>{escape(traced.timeline)}</pre>",
            f"<h2>Graph{escape(f': {names[0]}' if len(runs) > 1 else '')}</h2>",
            _graph(runs[0], traced),
            "<h2>Samples</h2>",
            f'<p class="faint">{escape(note)} {about_pictures}Choose a row to see its samples side by side,'
            " step by step.</p>",
            FILTERS,
            "<h2>Config</h2>",
            *_configs(runs, names),
            f'<script type="application/json" id="samples">{block}</script>',
            f"<script>{script}</script></body></html>",
            "",
        ]
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the runs' paths that differ."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def _overview(runs: Sequence[ReportedRun], names: Sequence[str]) -> Iterator[str]:
    yield '<div class="wide"><table><thead><tr><th>run</th><th>algorithm</th><th>model</th><th>steps</th><th>state</th>'
    yield "<th>validation before, after</th></tr></thead>"
    for run, name in zip(runs, names, strict=True):
        module = run.config.get("module") or {}
        models = [value for key, value in _flat(module) if key.rpartition(".")[2] == "model" and value != "null"]
        steps = max((line["step"] or 0 for line in run.lines), default=0)
        wanted = (run.config.get("trainer") or {}).get("max_steps")
        ends = [
            f"{metric} {points[0][1]:.3f}, {points[-1][1]:.3f}"
            for metric in ("val/accuracy", "val/reward", "val/loss", "val/margin")
            if (points := run.points(metric))
        ]
        state = "ended" if run.summary else "in progress, or did not come to its end"
        cells = (
            name,
            str(module.get("class_path", "-")).rpartition(".")[2],
            ", ".join(dict.fromkeys(each.strip('"') for each in models)) or "-",
            f"{steps:g}" + (f" of {wanted}" if wanted else ""),
            state,
            "; ".join(ends) or "-",
        )
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    yield "</table></div>"


def _health(runs: Sequence[ReportedRun], names: Sequence[str]) -> Iterator[str]:
    for run, name in zip(runs, names, strict=True):
        start = f"{escape(name)}: " if len(runs) > 1 else ""
        found = run.unhealthy
        if not found:
            yield f'<p class="good">{start}All metrics that are compared with a range are within it.</p>'
            continue
        yield f'<p class="bad">{start}{len(found)} metrics are outside their healthy range.</p>'
        yield '<div class="wide"><table><thead><tr><th>metric</th><th>found</th><th>healthy</th>'
        yield "<th>what to do</th></tr></thead>"
        for each in found:
            rest = "".join(f"<td>{escape(cell)}</td>" for cell in (each.found, each.healthy, each.advice))
            yield f"<tr><td><code>{escape(each.metric)}</code></td>{rest}</tr>"
        yield "</table></div>"


def _charts(runs: Sequence[ReportedRun], names: Sequence[str]) -> Iterator[str]:
    """A panel for each title of `PANELS` for which a run logged metrics; with several runs, each has its colour."""
    for title, patterns in PANELS.items():
        curves = []
        for number, (run, name) in enumerate(zip(runs, names, strict=True)):
            for place, (metric, points) in enumerate(_of_panel(run, title, patterns).items()):
                shares = metric in ("val/accuracy", "val_greedy/accuracy")
                several = len(runs) > 1
                colour, dash = (number, place % 4) if several else (place, 0)
                prompts = run.summary.get("problems") if shares else None
                curves.append(Curve(f"{name}: {metric}" if several else metric, points, colour, dash, prompts))
        if curves:
            yield chart(title, curves)


def _of_panel(run: ReportedRun, title: str, patterns: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """The curves of a panel, by name."""
    if title == "Share of samples in groups of equal rewards":
        useful = [name for name in _logged(run) if name.endswith("/useful_share")]
        return {f"1 - {name}": [(step, 1 - value) for step, value in run.points(name)] for name in useful}
    if title == "Tokens per second":
        seconds = dict(run.points("time/step"))
        rates = [(step, tokens / seconds[step]) for step, tokens in run.points("rollout/tokens") if seconds.get(step)]
        return {"rollout/tokens / time/step": rates} if rates else {}
    found = [name for pattern in patterns for name in _logged(run) if _matches(name, pattern)]
    return {name: points for name in dict.fromkeys(found) if (points := run.points(name))}


def _logged(run: ReportedRun) -> Iterable[str]:
    return dict.fromkeys(name for line in run.lines for name in line)


def _matches(name: str, pattern: str) -> bool:
    if pattern == "reward/*":
        return name.startswith("reward/") and name not in NOT_PARTS
    start, star, end = pattern.partition("*")
    of_validation = pattern.startswith("*") and name.startswith(VALIDATION)
    return name == pattern if not star else name.startswith(start) and name.endswith(end) and not of_validation


def chosen_samples(runs: Sequence[ReportedRun]) -> tuple[list[dict[str, Any]], str]:
    """Samples of evenly chosen steps of each run, with those of a few prompts that come in several steps; and a note.

    There are at most `MOST_SAMPLES` of a run, and at most `MOST_BYTES` of all as JSON: where they have more, fewer are
    chosen, and in the end their texts are cut.
    """
    counts = [_counted(run) for run in runs]
    total = sum(sum(steps.values()) for steps, _ in counts)
    if not total:
        return [], "The run stored no samples: nothing was generated."
    most, cut = MOST_SAMPLES, False
    while True:
        found = [
            _cut(sample | {"run": number}) if cut else sample | {"run": number}
            for number, (run, (steps, repeated)) in enumerate(zip(runs, counts, strict=True))
            for sample in _chosen(run, steps, repeated, most)
        ]
        ends = [*accumulate(len(_as_json(sample).encode(errors="replace")) for sample in found)]
        if not found or ends[-1] <= MOST_BYTES or most <= 1:
            break
        most //= 2
        cut = most < 20
    found = found[: bisect_right(ends, MOST_BYTES)]  # all, unless those of a single step are too much
    note = f"{len(found)} of the {total} samples that were stored, evenly over steps."
    if len(found) == total:
        note = f"All {total} samples that were stored."
    if cut:
        note += f" Texts of more than {MOST_CHARACTERS:,} characters are cut."
    return found, note


def _counted(run: ReportedRun) -> tuple[dict[int, int], list[int]]:
    """Number of samples in each step, and the prompts that come in most steps, if in more than one."""
    if not (run.folder / SAMPLES_FILE).is_file():
        return {}, []
    steps: dict[int, int] = defaultdict(int)
    of_rows: dict[int, set[int]] = defaultdict(set)
    for sample in read_samples(run.folder):
        steps[sample["step"]] += 1
        of_rows[sample.get("row", -1)].add(sample["step"])
    repeated = sorted((row for row in of_rows if len(of_rows[row]) > 1), key=lambda row: -len(of_rows[row]))
    return dict(sorted(steps.items())), repeated[:MOST_REPEATED]


def _chosen(run: ReportedRun, steps: Mapping[int, int], repeated: Sequence[int], most: int) -> Iterator[dict[str, Any]]:
    """About `most` samples, at most a quarter of them of `repeated` prompts in other steps than the chosen ones."""
    if not steps:
        return
    number = max(1, round(most * (0.75 if repeated else 1) / max(steps.values())))
    every = list(steps)
    if number < len(every):
        even = {every[round(place * (len(every) - 1) / max(1, number - 1))] for place in range(number)}
    else:
        even = set(every)
    others = most // 4
    for sample in read_samples(run.folder):
        is_other = sample["step"] not in even and sample.get("row") in repeated and others > 0
        others -= is_other
        if sample["step"] in even or is_other:
            yield {name: sample[name] for name in SHOWN if sample.get(name) is not None}


SHOWN = (
    *("step", "row", "sample", "prompt", "response", "reward", "failed", "parts", "columns", "ended", "messages"),
    *("path", "episode", "continues", "pictures"),
)


def with_pictures(runs: Sequence[ReportedRun], samples: Sequence[dict[str, Any]]) -> tuple[list[str], str]:
    """Put the pictures of prompts into the samples, see `PagePictures.of_sample`.

    Returns:
        The pictures as `data:` URLs, and a note; both are empty where no sample has a picture.
    """
    found, data = PagePictures(), dict[int, PromptData | str]()
    shown = [sample for sample in samples if sample.get("pictures")]
    for sample in shown:
        run = sample["run"]
        if run not in data:
            try:
                data[run] = runs[run].configured.data.resolved()
            except UserError as error:
                data[run] = one_line(error)
        names, of_run = sample["pictures"], data[run]
        if isinstance(of_run, str):
            sample["pictures"] = [{"name": name, "why": of_run} for name in names]
        else:
            sample["pictures"] = found.of_sample(sample["row"], names, of_run)
    if not shown:
        return [], ""
    note = f"{len(found.encoded)} images of prompts, {SIDE} pixels a side or less, from the dataset as it is now; "
    if found.left_out:
        note += f"{found.left_out} are left out beyond {MOST_PICTURE_BYTES:,} bytes. "
    else:
        note += f"there is room for {MOST_PICTURE_BYTES:,} bytes. "
    return found.encoded, note


def _as_json(value: Any) -> str:
    """JSON that can stand in a script of a page: no text in it ends the script."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


def _cut(value: Any) -> Any:
    """Texts within a sample, of `MOST_CHARACTERS` at most."""
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        return f"{value[:MOST_CHARACTERS]} ... {len(value) - MOST_CHARACTERS:,} characters are left out"
    if isinstance(value, dict):
        return {name: _cut(each) for name, each in value.items()}
    return [_cut(each) for each in value] if isinstance(value, list) else value


def _graph(run: ReportedRun, traced: Traced) -> str:
    """The graph of the run's config; or why it cannot be drawn."""
    try:
        found = run.configured
        settings, engines = found.trainer.settings, found.trainer.engine_settings
        planned = plan_run(found.module, settings, engines, settings_of(found.data.train))
    except UserError as error:
        return f"<p>No graph: {escape(one_line(error))}.</p>"
    drawing = graph_drawing(planned.graph, planned.plan, traced.sent)
    return f'<p class="faint">{" ".join(_about_edges(traced))}</p><div class="wide">{drawing}</div>'


def _about_edges(traced: Traced) -> Iterator[str]:
    yield "Each box is a node and its value. A local edge is read on the ranks that made its rows."
    if not traced.sent:
        yield "A dashed edge is exchanged between ranks; no traces of this run have its bytes."
        return
    yield (
        "A dashed edge is exchanged between ranks: its label has the bytes of the rows that went from one rank to"
        f" another in step {traced.step}, {in_bytes(sum(traced.sent.values()))} over all edges. Readers with one"
        " layout share an exchange."
    )
    if traced.missing:
        yield f"Without what {rank_ranges(tuple(traced.missing))} sent, whose traces are not here."


def _configs(runs: Sequence[ReportedRun], names: Sequence[str]) -> Iterator[str]:
    """The settings that differ between the runs, and each config."""
    if len(runs) > 1:
        flat = [dict(_flat(run.config)) for run in runs]
        keys = [
            key
            for key in dict.fromkeys(key for each in flat for key in each)
            if len({each.get(key) for each in flat}) > 1
        ]
        yield (
            f"<p>{'1 setting differs' if len(keys) == 1 else f'{len(keys)} settings differ'}.</p>"
            + '<div class="wide"><table><thead><tr><th>setting</th>'
        )
        yield f"{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr></thead>"
        for key in keys:
            cells = "".join(f"<td>{escape(each.get(key, '-'))}</td>" for each in flat)
            yield f"<tr><td><code>{escape(key)}</code></td>{cells}</tr>"
        yield "</table></div>"
    for run, name in zip(runs, names, strict=True):
        text = yaml.safe_dump(run.config, sort_keys=False) if run.config else "started from Python, without a config"
        yield f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>"


def _flat(config: Any, start: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys with their values as JSON."""
    if isinstance(config, dict) and config:
        for key, value in config.items():
            yield from _flat(value, f"{start}.{key}" if start else str(key))
    else:
        yield start, json.dumps(config, default=str, ensure_ascii=False)


FILTERS = """<form id="filters">
<label>search<input name="search" type="search" placeholder="text"></label>
<label>run<select name="run"><option value="">all</option></select></label>
<label>step<select name="step"><option value="">all</option></select></label>
<label>row<select name="row"><option value="">all</option></select></label>
<label>ended<select name="ended"><option value="">any</option></select></label>
<label>reward from<input name="least" type="number" step="any"></label>
<label>to<input name="most" type="number" step="any"></label>
<span id="count" class="faint"></span></form>
<div id="list"></div><p><button id="more" type="button" hidden>more</button></p>"""
