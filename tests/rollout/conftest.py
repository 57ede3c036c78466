"""Models for the engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.models.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output layer is its embedding."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tied", layers=2, max_position=512)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an output layer of its own."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "untied", layers=2, max_position=512, tie=False)
