"""Benchmarks read what runs log."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from rlflow.algorithms import DAPO
from rlflow.models.tiny import write_tiny_model
from tests.controller.runs import Fit, OddCharacters, fit, sums

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
METRIC = re.compile(r"(time|rollout|exchange|sync|balance|filter)/[a-z_]+")  # logged by every run, not by an algorithm


def metrics_read(file: Path) -> set[str]:
    """The names of metrics in a file, such as `time/step`."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if METRIC.fullmatch(text)}


def test_metrics_that_benchmarks_read_are_logged(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "policy", hidden_size=32, layers=1, max_position=256)
    module = DAPO(str(model), OddCharacters(), group_size=4, max_response_length=8, max_draws=10)
    (step,) = fit(Fit(module, sums(8, 2), tmp_path / "run")).steps
    read = {(name, file.name) for file in BENCHMARKS.rglob("*.py") for name in metrics_read(file)}
    assert ("time/step", "predicted.py") in read
    assert sorted((name, file) for name, file in read if name not in step) == []
