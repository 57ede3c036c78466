"""Ranks in which the device is set up: processes of their own, as it changes torch for good."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlflow.models.tiny import write_tiny_model
from tests.ranks import RankPool

OF_THEIR_OWN = {"DS_ACCELERATOR": "cpu"}  # ranks with variables of their own are not forked from the others' server


@pytest.fixture(scope="package")
def device1() -> Iterator[RankPool]:
    """One process for the device."""
    with RankPool(1, OF_THEIR_OWN) as ranks:
        yield ranks


@pytest.fixture(scope="package")
def device2() -> Iterator[RankPool]:
    """Two processes for the device, joined by gloo."""
    with RankPool(2, OF_THEIR_OWN) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model."""
    folder = tmp_path_factory.mktemp("policy") / "policy"
    return write_tiny_model(folder, seed=1, hidden_size=32, intermediate_size=48, layers=2, max_position=256)
