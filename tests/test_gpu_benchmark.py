"""The GPU benchmark that users paste, run on the CPU: the command, its cases, and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from tests import own_folder

ROOT = Path(__file__).parent.parent


def report(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the report's cases, and what was printed."""
    file = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--report", str(file)]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    ran = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=900, env=environment)
    written = json.loads(file.read_text())
    assert written["machine"]["versions"]["torch"]
    return ran.returncode, written["cases"], ran.stdout + ran.stderr


@pytest.fixture
def gpu() -> Iterator[Any]:
    """The benchmark's module, which finds its others beside it."""
    folder = ROOT / "benchmarks"
    with own_folder.forgotten(folder):
        sys.path.insert(0, str(folder))
        yield import_module("gpu")


def test_each_case_has_a_name_of_its_own_and_settings_that_it_takes(gpu: Any) -> None:
    assert len({case.name for case in gpu.CASES}) == len(gpu.CASES)
    for case in gpu.CASES:
        signature(case.run).bind(ROOT, "cpu", case.devices, **case.settings)


def test_the_attention_case_passes_on_the_cpu(gpu: Any, tmp_path: Path) -> None:
    (case,) = (case for case in gpu.CASES if case.name == "attention-shared-window-sinks")
    found = case.run(tmp_path, "cpu", case.devices, **case.settings)
    assert len(found["values"]) == 5
    assert all(0 < value <= found["limits"][name] for name, value in found["values"].items())


@pytest.mark.slow
def test_gradients_of_one_batch_and_of_three_parts_on_two_ranks_are_those_of_float64(tmp_path: Path) -> None:
    code, cases, said = report(tmp_path, "--only", "gradients-zero3-two-ranks", "gradients-zero3-offload")
    assert code == 0, said
    assert {name: case["outcome"] for name, case in cases.items()} == {
        "gradients-zero3-two-ranks": "passed",
        "gradients-zero3-offload": "left out",
    }
    errors = cases["gradients-zero3-two-ranks"]["values"]
    assert max(errors.values()) < 1e-5
    assert len(errors) == 4


@pytest.mark.slow
def test_every_case_that_needs_no_gpu_passes_on_the_cpu(tmp_path: Path) -> None:
    code, cases, said = report(tmp_path)
    assert code == 0, said
    reasons = {case.get("reason") for case in cases.values() if case["outcome"] == "left out"}
    assert reasons == {"needs CUDA"}
    assert len([case for case in cases.values() if case["outcome"] == "passed"]) == 46
