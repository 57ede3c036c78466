"""Where a run's results lie."""

from __future__ import annotations

import json
from pathlib import Path

from rlflow.run.folder import RunFolder


def test_what_lay_in_the_folder_is_kept_under_other_names(tmp_path: Path) -> None:
    for content in "abc":
        RunFolder.open(tmp_path / "run").config.write_text(content)
    assert {path.name: (path / "config.yaml").read_text() for path in tmp_path.iterdir()} == {
        "run-1": "a",
        "run-2": "b",
        "run": "c",
    }


def test_an_empty_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    RunFolder.open(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_that_starts_from_another_run_s_model_carries_on_its_seconds(tmp_path: Path) -> None:
    first, second = (RunFolder.open(tmp_path / name) for name in ("sft", "grpo"))
    first.write_summary({"steps": 1}, started_from=Path("tiny"))
    summary = second.write_summary({"steps": 2}, started_from=first.model)
    assert list(summary["seconds"]) == ["sft", "grpo"]
    assert json.loads(second.summary.read_text()) == summary


def test_a_stranger_s_summary_beside_a_model_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("no JSON")
    summary = RunFolder.open(tmp_path / "run").write_summary({}, started_from=tmp_path / "qwen")
    assert list(summary["seconds"]) == ["run"]
