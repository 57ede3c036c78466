"""Each family's model on disk, once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.families.models import write_family


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`family(name)`: the folder of its model."""
    folder = tmp_path_factory.mktemp("families")

    @cache
    def write(name: str) -> Path:
        return write_family(name, folder / name)

    return write
