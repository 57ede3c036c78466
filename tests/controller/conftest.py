"""The model that runs start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.models.tiny import write_tiny_model


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with its output layer tied to its embedding."""
    folder = tmp_path_factory.mktemp("policy") / "policy"
    return write_tiny_model(folder, seed=1, hidden_size=128, intermediate_size=96, layers=2, max_position=256)
