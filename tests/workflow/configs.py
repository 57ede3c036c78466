"""Configs of workflows as files, and the faults in them."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from rlflow.commands.fit import read_fit
from rlflow.dag.graph import Graph
from rlflow.errors import UserError
from rlflow.module import RLModule
from rlflow.run.prepare import read_graph

CONFIGS = Path(__file__).parent.parent.parent / "configs"
FUNCTIONAL = "rlflow.functional.group_normalized_advantages"
STEPS = "tests.workflow.steps"
WORKFLOW = CONFIGS / "workflow_grpo.yaml"
GRPO = CONFIGS / "grpo.yaml"


def module_of(folder: Path, *nodes: str, on: Path = WORKFLOW, options: tuple[str, ...] = ()) -> RLModule:
    """The module of a shipped config with nodes from files of their own on top: `1.yaml`, `2.yaml` and so on."""
    arguments = ["--config", str(on)]
    for number, text in enumerate(nodes, 1):
        path = folder / f"{number}.yaml"
        path.write_text("nodes:\n" + textwrap.indent(textwrap.dedent(text).strip(), "  ") + "\n")
        arguments += ["--config", str(path)]
    return read_fit([*arguments, *options]).module


def graph_of(folder: Path, *nodes: str, on: Path = WORKFLOW, options: tuple[str, ...] = ()) -> Graph:
    """The graph of `module_of`."""
    return read_graph(module_of(folder, *nodes, on=on, options=options))


def refusal(folder: Path, *nodes: str, on: Path = WORKFLOW, options: tuple[str, ...] = ()) -> str:
    """The one line that refuses the config."""
    with pytest.raises(UserError) as error:
        graph_of(folder, *nodes, on=on, options=options)
    assert "\n" not in str(error.value)
    return str(error.value)
