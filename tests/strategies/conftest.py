"""Fixtures of the strategies' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.models.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model whose matrices are large enough for ZeRO-3 to divide."""
    folder = tmp_path_factory.mktemp("strategies") / "tiny"
    return write_tiny_model(folder, seed=1, hidden_size=128, intermediate_size=192, layers=2)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, with an output layer of its own."""
    folder = tmp_path_factory.mktemp("strategies") / "untied"
    return write_tiny_model(folder, seed=2, hidden_size=128, intermediate_size=192, layers=1, tie=False)
