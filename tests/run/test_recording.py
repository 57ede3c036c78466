"""What a run says at its end."""

from __future__ import annotations

from pathlib import Path

from rlflow.run.folder import RunFolder
from rlflow.run.recording import closing_lines


def test_a_run_says_what_joins_its_traces(tmp_path: Path) -> None:
    folder, summary = RunFolder(tmp_path), {"steps": 2, "seconds": {"run": 1.0}}
    assert "traces/ (`rlflow trace`)" in closing_lines(folder, summary)[-1]
