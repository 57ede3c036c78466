"""Runs as a page: its texts are worked out by hand, its structure is parsed, and a browser uses it if there is one."""

from __future__ import annotations

import base64
import json
import math
import random
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from contextlib import closing
from html import unescape
from html.parser import HTMLParser
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image, ImageColor

from rlflow import UserError
from rlflow.cli import main
from rlflow.commands import report_pictures
from rlflow.commands.fit import read_fit
from rlflow.commands.parser import call
from rlflow.commands.report import page_text, report
from rlflow.commands.report_charts import Curve, Z, chart, graph_drawing, in_bytes, short, thinned, ticks, wilson
from rlflow.commands.report_health import RANGES, findings
from rlflow.commands.report_page import (
    MOST_BYTES,
    MOST_SAMPLES,
    PANELS,
    ReportedRun,
    _of_panel,
    chosen_samples,
    with_pictures,
)
from rlflow.commands.report_server import open_server
from rlflow.dag.tasks import Exchange
from rlflow.loggers.jsonl import JSONLLogger
from rlflow.run.prepare import plan_run
from tests.test_docs import loaded, metric_rows

ROOT = Path(__file__).parents[2]
photographs = loaded(ROOT / "docs/pictures/photograph.py", "photographs")
ATTACK = '</script><script>document.title = "attacked"</script><img src=x onerror="document.title = 1">'
TALK = [
    {"role": "user", "content": "9+2"},
    {"role": "assistant", "content": "add(9, 2)", "reward": 0.0},
    {"role": "tool", "name": "add", "content": "11"},
    {"role": "assistant", "content": f"11 {ATTACK}", "reward": 1.0, "ended": "the policy called no tool"},
]


def sample(row: int, **more: Any) -> dict[str, Any]:
    rest = {"parts": {}, "failed": None, "turns": 1, "ended": "done", "messages": []}
    return {"row": row, "sample": 0, "prompt": f"{row}+1=", "response": "2", "reward": 1.0, **rest, **more}


def written(folder: Path, steps: int = 3, lr: float = 0.1, **metrics: float) -> Path:
    """A run's folder, with row 7 in every step."""
    folder.mkdir(parents=True)
    logger = JSONLLogger()
    logger.start(folder)
    for step in range(1, steps + 1):
        logger.log_metrics({"reward/mean": step / steps, "rollout/truncated": 0.5, "time/step": 2.0, **metrics}, step)
        rows = [sample(7, response=f"at {step}"), sample(100 + step, messages=TALK, reward=0.0, ended="tokens")]
        logger.log_samples(rows, step)
    logger.finalize("success")
    config = yaml.safe_load((ROOT / "configs/quickstart_sft.yaml").read_text())
    config["module"]["init_args"]["actor"]["optimizer"]["lr"] = lr
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"predict": None}))  # as `rlflow fit` leaves it
    return folder


class Parsed(HTMLParser):
    """Checks that what is opened is closed, and collects scripts and what would be fetched."""

    EMPTY = frozenset({"meta", "img", "input", "path", "line", "circle", "rect", "polyline", "polygon", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.fetched: list[str] = []
        self.headings: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") for name, _ in attrs)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "script":
            self.scripts.append("")
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        if self.open[-1:] == ["h2"]:
            self.headings.append(data)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of two runs, one of them with a name that would be HTML."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [written(folder / "<b>first"), written(folder / "second", lr=0.2)]
    main(["report", *map(str, runs), "--html"])
    return (runs[0] / "report.html").read_text()


def test_the_page_is_whole_and_fetches_nothing(page: str) -> None:
    parsed = Parsed(page)
    assert parsed.fetched == []
    assert parsed.headings[:2] == ["Is it healthy?", "Curves"]  # what is wrong comes first
    assert "connect-src 'none'" in page
    assert "<b>first" not in page


def test_a_response_with_a_script_is_data_of_the_page_and_no_script(page: str) -> None:
    parsed = Parsed(page)
    data, _ = parsed.scripts  # no third one
    samples = json.loads(data)["samples"]
    assert {each["messages"][-1]["content"] for each in samples if each.get("messages")} == {f"11 {ATTACK}"}
    assert "<script>document" not in page


def test_the_page_draws_the_graph_and_says_what_differs_between_runs(page: str) -> None:
    assert re.search(r'<svg class="graph".*>actor_loss</text>.*</svg>', page)
    assert re.findall(r"<tr><td><code>(module[^<]*)</code></td><td>([^<]*)</td><td>([^<]*)</td>", page) == [
        ("module.init_args.actor.optimizer.lr", "0.1", "0.2")
    ]
    assert "1 setting differs" in page


def test_a_role_whose_name_begins_as_validation_has_its_curve(tmp_path: Path) -> None:
    run = written(tmp_path / "run", **{"value/loss": 1.0, "val/loss": 2.0})  # type: ignore[arg-type]
    assert list(_of_panel(ReportedRun(run), "Loss", PANELS["Loss"])) == ["value/loss"]


def test_readers_that_share_an_exchange_are_not_counted_twice(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "configs/ppo.yaml").read_text())
    config["module"]["init_args"] |= {"actor": "tiny", "critic": "tiny"}
    config["trainer"] = {"devices": 2, "accelerator": "cpu"}
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(config))
    found = read_fit(["--config", str(tmp_path / "ppo.yaml")])
    run = plan_run(found.module, found.trainer.settings, found.trainer.engine_settings)
    lines = [str(task) for task in run.plan.every() if isinstance(task, Exchange)]
    drawn = graph_drawing(run.graph, run.plan, {line: 1000 + number for number, line in enumerate(lines)})
    carried = re.findall(r'<text class="carried"[^>]*>([^<]*)</text>', drawn)
    assert len(carried) == len(re.findall('class="edge', drawn)) > 10
    assert sorted(each for each in carried if each.endswith(" B")) == [f"{1000 + n} B" for n in range(len(lines))]
    reader = run.graph.readers("rollout")[1].id  # the first one scores where the rollout was made
    assert f"with {reader}" in carried


def test_a_metric_outside_its_range_is_named_with_what_to_do(page: str) -> None:
    found = re.findall(r"<tr><td><code>rollout/truncated</code></td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>", page)
    assert found[0][:2] == ("0.5 (median of the last 3); outside in 3 of 3 records", "below 0.05")
    assert found[0][2].startswith("raise `max_response_length`")


def test_the_ranges_are_those_of_the_documentation() -> None:
    rows = {name: row for row in metric_rows() for name in re.findall(r"`([^`]+)`", row[0])}
    for each in RANGES:
        _, _, healthy, otherwise = rows[each.metric]
        assert each.healthy in healthy, each.metric
        assert each.otherwise in otherwise, each.metric
        numbers = [float(number) for number in re.findall(r"\d+\.\d+", each.healthy)]
        ends = [abs(end) for end in (each.low, each.high) if math.isfinite(end)]
        if numbers and " of 1" not in each.healthy:
            assert numbers[-1:] == ends, each.metric


def test_a_share_of_the_step_and_a_count_of_failures_are_judged() -> None:
    quiet = [{"step": step, "time/step": 2.0, "time/sync": 0.19, "reward/errors": 0.0} for step in range(20)]
    assert list(findings(quiet)) == []
    slow = [{**line, "time/sync": 0.3} for line in quiet]
    failed = [{**quiet[0], "reward/errors": 2.0}, *quiet[1:]]  # in the first step alone
    assert [(each.metric, each.found[:21]) for each in findings(slow)] == [("time/sync", "0.15 of `time/step` (")]
    assert [(each.metric, each.found[:11]) for each in findings(failed)] == [("reward/errors", "2 (at most)")]
    assert [each.metric for each in findings([{"step": 1, "actor/loss": None}])] == ["actor/loss"]
    skipped = [{**line, "critic/skipped_updates": 1.0} for line in slow]  # first, since the rest may follow from it
    assert [each.metric for each in findings(skipped)] == ["critic/skipped_updates", "time/sync"]
    uneven = [{"step": 1, "time/straggler_share": 0.5}]
    assert [len(list(findings(uneven, placed))) for placed in (False, True)] == [1, 0]


@pytest.mark.parametrize(
    ("config", "apart"),
    [
        ("placement: {rollout: 0, actor: 1}", True),
        ("placement: {actor: {tensor_parallel_size: 2}}", False),
        ("", False),
    ],
)
def test_a_rank_that_works_longer_is_healthy_if_the_config_places_roles_apart(
    config: str, apart: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(f"trainer: {{}}\n{config}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/straggler_share": 0.5}\n')
    found = [each.metric for each in ReportedRun(tmp_path).unhealthy]
    assert found == ([] if apart else ["time/straggler_share"])


def test_a_thinned_curve_keeps_its_ends_and_its_spikes() -> None:
    points = [(float(x), 100.0 if x == 7777 else math.sin(x)) for x in range(10_000)]
    thin = thinned(points)
    assert len(thin) <= 400
    assert [thin[0], thin[-1]] == [points[0], points[-1]]
    assert (7777.0, 100.0) in thin
    assert thin == sorted(thin)


@pytest.mark.parametrize(("share", "prompts"), [(0.0, 8), (0.43, 256), (1.0, 30)])
def test_the_ends_of_an_interval_are_z_deviations_from_the_share(share: float, prompts: int) -> None:
    # Wilson's definition: p is an end where |share - p| = z sqrt(p (1 - p) / n).
    for end in wilson(share, prompts):
        assert abs(share - end) == pytest.approx(Z * math.sqrt(max(0.0, end * (1 - end)) / prompts), abs=1e-9)


@pytest.mark.parametrize(("accuracy", "bands"), [(0.85, 1), (85.0, 0)])
def test_a_module_s_own_accuracy_in_percent_has_no_interval(accuracy: float, bands: int) -> None:
    assert chart("accuracy", [Curve("val/accuracy", [(0, accuracy)], prompts=64)]).count('class="band') == bands


@pytest.mark.parametrize("ends", [(0.0, 1.0), (-0.3, 0.31), (5.0, 5.0), (0.0, 0.0), (1e-7, 6.2e-6), (-3.0, 1e6)])
def test_ticks_are_round_few_and_around_the_values(ends: tuple[float, float]) -> None:
    marks = ticks(*ends)
    assert 2 <= len(marks) <= 7
    assert marks[0] <= ends[0] + 1e-9
    assert marks[-1] >= ends[1] - 1e-9


def test_numbers_have_four_digits_and_a_suffix() -> None:
    assert [short(x) for x in (0.20034, 6066.0, 128_456.0, 2.5e9, 5.6e-7)] == [
        "0.2003",
        "6066",
        "128.5k",
        "2.5G",
        "5.6e-07",
    ]


def test_bytes_are_shown_in_units_of_a_thousand() -> None:
    assert [in_bytes(number) for number in (0, 512, 9_999, 128_456, 2.5e9)] == [
        "0 B",
        "512 B",
        "9999 B",
        "128.5 kB",
        "2.5 GB",
    ]


def test_of_a_long_run_some_samples_are_chosen_evenly_over_steps(tmp_path: Path) -> None:
    run = ReportedRun(written(tmp_path / "run", steps=2000))
    found, note = chosen_samples([run])
    assert len(found) <= MOST_SAMPLES * 1.01
    steps = sorted({each["step"] for each in found if each["row"] != 7})
    assert (steps[0], steps[-1]) == (1, 2000)
    assert max(after - before for before, after in pairwise(steps)) < 2 * 2000 / len(steps)
    assert note.startswith(f"{len(found)} of the 4000 samples")


def test_samples_with_long_texts_are_cut_and_the_page_says_so(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", steps=1)
    with (folder / "samples.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, **sample(1, response="x" * 300_000)}) + "\n" for step in range(2, 50))
    found, note = chosen_samples([ReportedRun(folder)])
    assert len(json.dumps(found)) < MOST_BYTES
    assert "are cut" in note


METRICS = [  # that fill every panel, with several curves
    *("reward/mean", "greedy_reward/mean", "best/reward", "reward/mine", "reward/theirs", "val/loss", "val/margin"),
    *(
        "val/accuracy",
        "val_greedy/accuracy",
        "val/reward",
        "val_greedy/reward",
        "val/pass@1",
        "val/pass@8",
        "val/length",
    ),
    *("rollout/length", "rollout/truncated", "val/truncated", "sync/logprob_gap", "sync/logprob_gap_uncertain"),
    *("rollout/turns", "rollout/tool_calls", "rollout/tokens", "time/step", "exchange/bytes"),
    *(f"{role}/{name}" for role in ("actor", "critic") for name in ("loss", "kl", "teacher_kl", "entropy")),
    *(f"{role}/{name}" for role in ("actor", "critic") for name in ("clip_fraction", "grad_norm", "useful_share")),
]


@pytest.mark.parametrize(("letter", "letters", "least"), [("<", 2_000, 2_000_000), ("ß", 25_000, 500_000)])
def test_the_page_of_four_long_runs_has_less_than_3_mb(letter: str, letters: int, least: int, tmp_path: Path) -> None:
    draw, runs = random.Random(0), [written(tmp_path / f"run{number}", steps=1) for number in range(4)]
    for run in runs:
        with (run / "metrics.jsonl").open("a") as file:
            for step in range(2, 1000):
                file.write(json.dumps({"step": step} | {name: draw.random() for name in METRICS}) + "\n")
        with (run / "samples.jsonl").open("a") as file:
            talk = [{"role": "assistant", "content": letters * letter}] * 3  # a `<` has six letters in the page
            file.writelines(json.dumps({"step": step, **sample(step, messages=talk)}) + "\n" for step in range(2, 20))
    assert least < len(page_text(runs, None, 3).encode()) < 3_000_000


def test_secrets_of_the_config_are_not_in_the_page(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    secret = "module: {init_args: {reward: {init_args: {api_key: sk-12345}}}}"
    (folder / "config.yaml").write_text(f"{secret}\ntrainer: {{}}\n")
    main(["report", str(folder), "--html", "--to", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "sk-12345" not in page
    assert "No graph: " in page  # since this config is not whole


@pytest.mark.parametrize("text", ["", '{"steps": 3', "[]"])
def test_a_damaged_summary_is_one_line_that_names_the_file(tmp_path: Path, text: str) -> None:
    folder = written(tmp_path / "run")
    (folder / "summary.json").write_text(text)
    with pytest.raises(UserError, match=r"run/summary.json` is damaged .*; move it away"):
        call(report, [str(folder), "--html"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["other"], "2 runs can only be given with `--html`"),
        (["--to", "a.html"], "`--to` can only be given with `--html`"),
        (["--watch"], "`--watch` can only be given with `--html`"),
        (["--html", "--draw", "a.png"], "`--draw` belongs to the report without a page"),
        (["--html"], "has no metrics.jsonl; give the folder of a run that began"),
    ],
)
def test_what_cannot_be_made_is_refused(tmp_path: Path, arguments: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        call(report, [str(tmp_path), *arguments])


def test_the_served_page_is_made_again_when_the_metrics_grow(tmp_path: Path) -> None:
    folder, made = written(tmp_path / "run"), list[str]()
    server = open_server([folder], lambda version: made.append(version) or f"page {version}")  # type: ignore[func-returns-value]
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def got(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    with closing(server.socket):
        first = got("/version")
        assert [got("/"), got("/")] == [f"page {first}"] * 2
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4}\n')
        second = got("/version")
        assert got("/") == f"page {second}"
        assert made == [first, second]
        request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}/", headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):  # a site whose name leads to the loopback
            urllib.request.urlopen(request, timeout=30)
        server.shutdown()


USES = """
const results = [], set = (name, value) => {
  document.forms[0].elements[name].value = value;
  document.forms[0].dispatchEvent(new Event("input"));
  results.push(document.querySelectorAll("article").length);
};
set("search", "at 2"); set("search", "</" + "SCRIPT>"); set("search", "");
set("row", "7"); results.push(list.className);
set("row", ""); set("least", "0.5"); set("least", ""); set("ended", "tokens"); set("run", "1");
results.push(document.querySelectorAll("article:first-child .assistant").length);
document.title = JSON.stringify(results);
"""


def opened(text: str, folder: Path, width: int) -> str:
    """The page as a browser of this width has it once its script has run; the browser must not complain."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here: install Debian's package `chromium`")
    file = folder / "page.html"
    file.write_text(text)
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    of_window = [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900"]
    ran = subprocess.run([*command, *of_window, file.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in ran.stderr, ran.stderr
    return ran.stdout


def used(page: str, script: str, folder: Path) -> Any:
    """The title, in JSON, that a script leaves which uses the page as a reader would."""
    # The page admits no script but its own: here this one is let in.
    free = re.sub("script-src [^;]*;", "script-src 'unsafe-inline';", page)
    shown = opened(free.replace("</body>", f"<script>{script}</script></body>"), folder, 1300)
    title, *_ = re.findall("<title>(.*?)</title>", shown)  # edges of the graph have others
    return json.loads(unescape(title))


@pytest.mark.slow
def test_a_browser_shows_the_page_without_errors_and_its_filters_work(page: str, tmp_path: Path) -> None:
    for width in (500, 1300):  # 500 pixels are the least of a window
        shown = opened(page, tmp_path, width)
        assert "<title>rlflow: " in shown  # the response's script did not run
        assert "of 12 samples" in shown
    # two runs of three steps, of each step one of row 7 and one conversation with two turns of the policy
    assert used(page, USES, tmp_path) == [2, 6, 12, 6, "beside", 12, 6, 12, 6, 3, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("dark", "colours"), [(False, ("#ffffff", "#1b1f24")), (True, ("#15181c", "#e4e7eb"))])
@pytest.mark.parametrize("width", [390, 1300])
def test_a_browser_shows_the_page_light_or_dark_and_cuts_nothing_off(
    page: str, width: int, dark: bool, colours: tuple[str, str]
) -> None:
    if photographs.browser() is None:
        pytest.skip("no Chromium here: install Debian's package `chromium`")
    picture, taken = photographs.photograph(page, width, 900, dark)
    assert taken == width
    ground, text = map(ImageColor.getrgb, colours)
    assert picture.getpixel((2, 2)) == ground
    assert text in {colour for _, colour in picture.crop((0, 0, width, 60)).getcolors(60 * width)}  # of the title


def test_the_page_in_the_documentation_is_as_it_is_made_now(tmp_path: Path) -> None:
    healthy = written(tmp_path / "run", **{"rollout/truncated": 0.0})  # type: ignore[arg-type]
    now, shown = page_text([healthy], None, 3), (ROOT / "docs/quickstart_report.html").read_text()
    parts = ("<style>.*?</style>", "<script>.*?</script>", "<h2>.*?</h2>", '<p class="good">.*?</p>', "<form .*</form>")
    for part in parts:
        made, stored = (re.findall(part, text, re.DOTALL) for text in (now, shown))
        assert made == stored, "make it anew, see docs/pictures/photograph.py"
    assert re.findall('<p class="faint">.*', now)[0] in shown  # of the curves


FORK = {"sample": "0.0", "tokens": 2, "text": "12"}
TREES = [  # leaves of row 9, two continue the first; and of row 8 an agent's episode of two rows
    sample(9, path="0.0", response="1234"),
    sample(9, path="0.1", sample=1, response=f"12{ATTACK}", continues=FORK, reward=0.5),
    sample(9, path="0.2", sample=2, response="129", continues=FORK),
    sample(8, messages=TALK),
    sample(8, sample=1, messages=[*TALK[:3], {"role": "assistant", "content": "12"}], episode="0"),
]
READ = """
const articles = (within) => [...within.querySelectorAll(":scope > article")].map((article) => {
  const texts = [...article.querySelectorAll(":scope > div > .text")].map((text) => text.textContent);
  return [...texts, ...articles(article)];
});
const least = document.forms[0].elements.least, whole = articles(list);
const begins = [...document.querySelectorAll(".text .faint")].map((text) => text.textContent);
const folded = document.querySelector("details").textContent;
least.value = "0.7";
document.forms[0].dispatchEvent(new Event("input"));
const filtered = articles(list);
least.value = "";
document.forms[0].elements.search.value = "document.title";
document.forms[0].dispatchEvent(new Event("input"));
document.title = JSON.stringify([whole, begins.filter((text) => text), folded, filtered, articles(list)]);
"""


@pytest.mark.slow
def test_a_browser_shows_which_sample_continues_which(tmp_path: Path) -> None:
    logger = JSONLLogger()
    logger.start(tmp_path)
    logger.log_metrics({"reward/mean": 1.0}, 1)
    logger.log_samples(TREES, 1)
    logger.finalize("success")
    report(tmp_path, html=True)
    page = (tmp_path / "report.html").read_text()
    first, middle, last = ["9+1=", "1234"], [f"12{ATTACK}"], ["129"]
    talk, again = [each["content"] for each in TALK], ["12"]
    whole, begins, folded, filtered, searched = used(page, READ, tmp_path)
    assert whole == [[*first, middle, last], [*talk, again]]
    assert begins == ["12", "12"]  # faint, as those of the first leaf
    assert folded.startswith("3 messages as in sample 0user9+2")
    assert filtered == [[*first, last], [*talk, again]]
    assert searched == [["9+1=", *middle], talk]  # by itself, with its prompt


def pictured(folder: Path, *images: str) -> ReportedRun:
    """A run whose dataset has a row for each of these pictures, and a sample of each in the first step."""
    written(folder / "run", steps=1)
    lines = [json.dumps({"question": "?", "image": image}) for image in images]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    config = {
        "module": {
            "class_path": "rlflow.algorithms.GRPO",
            "init_args": {"actor": "tiny_vision", "reward": "exact_match"},
        },
        "data": {"train": str(folder / "rows.jsonl"), "images": "image"},
        "trainer": {"accelerator": "cpu"},
    }
    (folder / "run/config.yaml").write_text(yaml.safe_dump(config))
    shown = [image if not image.startswith("data:") else f"{image[:40]}..., {len(image):,} letters" for image in images]
    with (folder / "run/samples.jsonl").open("a") as file:
        rows = [{"step": 1, **sample(row, pictures=[name])} for row, name in enumerate(shown)]
        file.writelines(json.dumps(each) + "\n" for each in rows)
    return ReportedRun(folder / "run")


def pictures_of(run: ReportedRun) -> tuple[list[dict[str, Any]], list[str], str]:
    """The picture of each sample that has one, all pictures, and the note."""
    samples, _ = chosen_samples([run])
    encoded, note = with_pictures([run], samples)
    return [picture for each in samples for picture in each.get("pictures", ())], encoded, note


def noise(file: Path, seed: int, size: tuple[int, int] = (900, 300)) -> str:
    """The name of a picture of coloured noise."""
    pixels = random.Random(seed).randbytes(size[0] * size[1] * 3)
    Image.frombytes("RGB", size, pixels).save(file)
    return file.name


def red(file: Path) -> None:
    """A red picture of 8 x 4 pixels."""
    file.parent.mkdir()
    Image.new("RGB", (8, 4), "red").save(file)


BREAKING = '"><script>document.title = 1</script>.png'  # a file in a folder


def test_a_picture_is_in_the_page_once_and_scaled_down(tmp_path: Path) -> None:
    red(tmp_path / BREAKING)
    url = f"data:;base64,{base64.b64encode((tmp_path / BREAKING).read_bytes()).decode()}"
    run = pictured(tmp_path, BREAKING, noise(tmp_path / "noise.png", 0), url)
    found, encoded, note = pictures_of(run)
    assert [each["number"] for each in found] == [0, 1, 0]  # the third is the first one's file
    first, second = (Image.open(BytesIO(base64.b64decode(each.partition(",")[2]))) for each in encoded)
    assert (first.size, first.getcolors()) == ((8, 4), [(32, (255, 0, 0))])
    assert second.size == (320, 107)
    assert note.startswith("2 images of prompts, 320 pixels a side or less")
    report(run.folder, html=True)
    page = (run.folder / "report.html").read_text()
    data, _ = Parsed(page).scripts  # no third one
    assert [each["pictures"][0]["name"] for each in json.loads(data)["samples"][2:4]] == [BREAKING, "noise.png"]


def test_a_picture_that_cannot_be_shown_is_a_line(tmp_path: Path) -> None:
    for name in ("cut.png", "changed.png"):
        noise(tmp_path / name, 0, (60, 60))
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:2000])
    (tmp_path / "text.png").write_text("no picture")
    names = ["gone.png", "text.png", "cut.png", "https://example.org/a.png", "changed.png"]
    run = pictured(tmp_path, *names)
    rows = (tmp_path / "rows.jsonl").read_text().replace("changed.png", "cut.png")
    (tmp_path / "rows.jsonl").write_text(rows)
    found, encoded, _ = pictures_of(run)
    assert (encoded, [each["name"] for each in found]) == ([], names)
    reasons = ["No such file", "is not an image", "cannot be decoded", "without a network", "has other images now"]
    for each, reason in zip(found, reasons, strict=True):
        assert reason in each["why"]
        assert "\n" not in each["why"]


def test_pictures_have_a_bound_of_their_own_which_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pictured(tmp_path, *(noise(tmp_path / f"{number}.png", number) for number in range(4)))
    whole = pictures_of(run)[1]
    monkeypatch.setattr(report_pictures, "MOST_BYTES", sum(map(len, whole[:3])))
    found, encoded, note = pictures_of(run)
    assert encoded == whole[:3]
    assert found[3]["why"].startswith("left out, as the images of the page have")
    assert "1 are left out beyond" in note


@pytest.mark.slow
def test_a_browser_shows_pictures_whatever_their_names(tmp_path: Path) -> None:
    red(tmp_path / BREAKING)
    run = pictured(tmp_path, BREAKING, "gone.png")
    talk = [{"role": "user", "content": [{"type": "text", "text": "look:"}, {"type": "image"}]}, *TALK[1:]]
    with (run.folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, **sample(0, pictures=[BREAKING], messages=talk)}) + "\n")
    report(run.folder, html=True)
    read = """document.title = JSON.stringify([
      [...document.querySelectorAll("article img")].map((image) => [image.naturalWidth, image.alt]),
      [...document.querySelectorAll("article p.text.faint")].map((line) => line.textContent.slice(0, 18)),
      [...document.querySelectorAll("article:last-of-type .other:nth-of-type(1) > *")].map((part) => part.tagName)]);"""
    page = (run.folder / "report.html").read_text()
    loaded = f"addEventListener('load', () => {{ {read} }});"
    assert used(page, loaded, tmp_path) == [2 * [[8, BREAKING]], ["no image gone.png:"], ["DIV", "P", "IMG"]]
