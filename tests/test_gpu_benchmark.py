"""The GPU benchmark that users paste, run on the CPU: the command, its cases, and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
