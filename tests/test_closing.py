"""What a run says at its end."""

from __future__ import annotations

from pathlib import Path

from rlflow.closing import closing_lines
from rlflow.run_folder import RunFolder


def test_a_run_whose_traces_were_not_joined_says_what_joins_them(tmp_path: Path) -> None:
    folder, summary = RunFolder(tmp_path), {"steps": 2, "seconds": {"run": 1.0}}
    folder.traces.mkdir()
    assert "traces/ (`rlflow report` joins the ranks')" in closing_lines(folder, summary)[-1]
    (folder.traces / "trace.json").touch()
    assert "traces/trace.json (ui.perfetto.dev)" in closing_lines(folder, summary)[-1]
