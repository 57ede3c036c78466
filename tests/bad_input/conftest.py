"""A folder to make mistakes in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow.models.causal_lm import ScoringModel
from tests.bad_input.refusal import Refused, refusal
from tests.own_folder import forgotten, make, write


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    with forgotten(tmp_path):  # `main` puts the folder on the path
        yield tmp_path


@pytest.fixture
def refused(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    def line(changes: dict[str, Any]) -> str:
        write(folder / "my.yaml", changes)
        loaded: list[Path] = []
        monkeypatch.setattr(ScoringModel, "load", lambda path, *_: loaded.append(path))
        found = refusal(capfd, "fit", "--config", "my.yaml")
        assert loaded == []
        return found

    return line
