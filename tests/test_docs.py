"""What the documentation shows is run: its algorithms, its configs, its pictures; and it leaves no metric out."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlflow.configuration import read_fit
from rlflow.preparation import read_graph
from rlflow.rewards import ExactMatch

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PICTURES = {"grpo": "quickstart_grpo", "grpo_8_gpus": "grpo_math_8gpu"}  # and the configs that they show


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def rlflow(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command, run in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "rlflow.cli", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def trained(folder: Path, page: str) -> Path:
    """The folder with the page's first algorithm and its config, written as the page says, and trained for a step."""
    (folder / "my_algorithm.py").write_text(blocks(page, "python")[0], encoding="utf-8")
    (folder / "my.yaml").write_text(blocks(page, "yaml")[0], encoding="utf-8")
    ran = rlflow("fit", "--config", "my.yaml", "--trainer.max_steps", "1", folder=folder)
    assert ran.returncode == 0, ran.stderr
    return folder


def imported(code: str, name: str, folder: Path) -> ModuleType:
    """`code` as a module of that name, from a file, since a graph names the lines of its nodes."""
    path = folder / f"{name}.py"
    path.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_long_algorithm_is_a_graph(tmp_path: Path) -> None:
    algorithm = imported(blocks("algorithm.md", "python")[0], "shown_reinforce", tmp_path)
    nodes = read_graph(algorithm.Reinforce("tiny", ExactMatch())).order
    assert [node.id for node in nodes] == ["rollout", "rewards", "advantages", "actor_loss"]


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the README's algorithm after one step."""
    return trained(tmp_path_factory.mktemp("readme"), "../README.md")


def test_the_algorithm_of_the_readme_trains_from_a_users_own_folder(readme: Path) -> None:
    assert json.loads((readme / "runs/short/summary.json").read_text(encoding="utf-8"))["steps"] == 1


def test_what_the_algorithm_of_the_readme_logs_is_recorded(readme: Path) -> None:
    (line,) = (readme / "runs/short/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = json.loads(line)
    assert logged["reward/price"] == pytest.approx(0.02 * logged["rollout/length"], rel=1e-6)


def test_the_page_long_algorithm_trains_from_a_users_own_folder(tmp_path: Path) -> None:
    summary = trained(tmp_path, "algorithm.md") / "runs/reinforce/summary.json"
    assert json.loads(summary.read_text(encoding="utf-8"))["steps"] == 1


def test_the_python_of_the_quickstart_says_what_its_yaml_says(tmp_path: Path) -> None:
    shown = imported(blocks("quickstart.md", "python")[0], "shown_quickstart", tmp_path)
    configured = read_fit(["--config", str(ROOT / "configs" / "quickstart_grpo.yaml")])
    assert plain(shown.module) == plain(configured.module)
    assert plain(shown.data) == plain(configured.data)
    theirs, ours = plain(configured.trainer), plain(shown.trainer)
    for said_by_one in ("run_dir", "resolved_config", "accelerator", "strategy"):  # a folder of its own; two defaults
        del theirs[said_by_one], ours[said_by_one]
    assert ours == theirs


def test_dr_grpo_is_a_variation_with_the_nodes_of_grpo(tmp_path: Path) -> None:
    variation = imported(blocks("algorithm.md", "python")[2], "shown_dr_grpo", tmp_path)
    graph = read_graph(variation.DrGRPO("tiny", ExactMatch()))
    assert set(graph.nodes) == {"rollout", "rewards", "advantages", "actor_loss"}


@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_of_a_graph_is_what_is_drawn_now(picture: str, tmp_path: Path) -> None:
    config = ROOT / "configs" / f"{PICTURES[picture]}.yaml"
    rlflow("graph", "--config", str(config), "--draw", str(tmp_path / picture), folder=ROOT)
    drawn, kept = ((folder / f"{picture}.svg").read_text() for folder in (tmp_path, DOCS / "pictures"))
    assert without_lines(kept) == without_lines(drawn), f"rlflow graph --config {config} --draw docs/pictures/{picture}"


def test_every_metric_that_the_code_names_is_explained() -> None:
    sources = [path for folder in ("rlflow", "algorithms") for path in (ROOT / folder).rglob("*.py")]
    name = re.compile(r'"(?:critic|reward|rollout|sync|exchange|time|actor|val|val_greedy)/[a-z_]+"')
    named = {found.strip('"') for path in sources for found in name.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > 10
    explained = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert [metric for metric in sorted(named) if metric not in explained] == []


def test_the_variation_keeps_the_graph_of_what_it_varies(tmp_path: Path) -> None:
    variation = imported(blocks("algorithm.md", "python")[1], "shown_variation", tmp_path)
    graph = read_graph(variation.LengthPenalty("tiny", ExactMatch()))
    assert graph.nodes["rewards"].file.endswith("shown_variation.py")
    assert graph.nodes["advantages"].reads == ("rollout", "rewards")


def test_the_config_of_the_reference_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "shown.yaml").write_text(blocks("configuration.md", "yaml")[0], encoding="utf-8")
    configured = read_fit(["--config", str(tmp_path / "shown.yaml")])
    assert configured.trainer.max_steps == 100
    assert configured.data.prompts_per_step == 32


def test_every_test_that_verification_names_exists() -> None:
    page = (DOCS / "verification.md").read_text(encoding="utf-8")
    missing, file = [], ""
    for named_file, name in re.findall(r"`([\w/]+\.py)?(?:::(test_\w+))?`", page):
        file = named_file or file  # `::test_...` is in the file named before it
        path = ROOT / "tests" / file
        if name and not (path.is_file() and re.search(rf"def {name}\b", path.read_text(encoding="utf-8"))):
            missing.append(f"{file}::{name}")
    assert missing == []


def test_no_document_installs_the_other_project() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")]
    told = [page.name for page in pages if re.search(r"pip install rlflow(?!-)", page.read_text(encoding="utf-8"))]
    assert told == []


@pytest.mark.parametrize("target", ["quickstart", "test", "check", "setup", "lock"])
def test_every_command_that_is_documented_exists(target: str) -> None:
    makefile = (DOCS.parent / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE)


def plain(thing: Any) -> Any:
    """What was said in constructing it, as plain values under the names of the arguments."""
    if isinstance(thing, list | tuple):
        return [plain(entry) for entry in thing]
    if not type(thing).__module__.startswith("rlflow"):
        return thing
    said = {name: plain(value) for name, value in vars(thing).items() if not name.startswith("_")}
    return {"class": type(thing).__name__, **said}


def without_lines(drawing: str) -> str:
    """A drawing without the lines at which nodes are written, which every edit moves."""
    return re.sub(r"\.py:\d+", ".py", drawing)
