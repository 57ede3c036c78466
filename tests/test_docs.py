"""What the documentation shows is run: its algorithms, and its config."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rlflow.configuration import read_fit
from rlflow.preparation import read_graph
from rlflow.rewards import ExactMatch

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


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


@pytest.mark.parametrize("target", ["quickstart", "test", "check", "setup", "lock"])
def test_every_command_that_is_documented_exists(target: str) -> None:
    makefile = (DOCS.parent / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE)
