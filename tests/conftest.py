"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from rlflow.known_answers import known_answers, numbers_of
from rlflow.models.tiny import write_tiny_model
from rlflow.process.environment_variables import PLACE
from tests import no_curves
from tests.ranks import RankPool, return_freed_memory
from tests.worker_processes import workers

pytest_plugins = ["tests.passed_tests"]
os.environ["RLFLOW_CACHE"] = ""  # nothing is kept for later runs
os.environ["DS_ACCELERATOR"] = "cpu"  # the ranks of tests import deepspeed before a strategy has a device
PLACE_AT_FIRST = {name: os.environ[name] for name in PLACE if name in os.environ}
no_curves.leave_empty()
settings.register_profile("rlflow", deadline=None)  # a busy machine is not a fault
settings.load_profile("rlflow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with vLLM come first, and so in one of the two processes: each that starts it computes for ten seconds."""
    items.sort(key=lambda item: not (isinstance(item, pytest.Function) and hasattr(item.module, "VLLMEngine")))


def pytest_collection_finish() -> None:
    gc.freeze()  # what libraries and modules of tests made stays, and need not be looked through again and again


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries complain of what outlives them


@pytest.fixture(autouse=True)
def _leaves_no_place_in_a_job() -> Iterator[None]:
    """A run that finds one believes that its other ranks are started by somebody else, and waits for them."""
    yield
    after = {name: os.environ[name] for name in PLACE if name in os.environ}
    for name in after.keys() - PLACE_AT_FIRST.keys():
        del os.environ[name]
    assert after == PLACE_AT_FIRST


@pytest.fixture(scope="module", autouse=True)
def _memory_of_other_modules() -> None:
    return_freed_memory()


def _pool(world_size: int) -> Iterator[RankPool]:
    with RankPool(world_size) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def ranks1() -> Iterator[RankPool]:
    """One real process in a gloo group of its own."""
    yield from _pool(1)


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Two real processes joined by gloo, started at the first `run`."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def ranks3() -> Iterator[RankPool]:
    """Three real processes joined by gloo."""
    yield from _pool(3)


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Four real processes joined by gloo."""
    yield from _pool(4)


@pytest.fixture(scope="session")
def known() -> dict[str, Any]:
    """The given numbers and the answers of each known answer, by name."""
    return {name: numbers_of(name) for name in known_answers()}


@pytest.fixture(scope="module", autouse=True)
def _no_workers_of_other_modules() -> Iterator[None]:
    """Rewards keep their workers as long as they live, and tests of other modules ask what is left of their own."""
    yield
    for worker in workers():
        worker.kill()
        worker.wait()


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with its output layer tied to its embedding."""
    folder = tmp_path_factory.mktemp("policy") / "policy"
    return write_tiny_model(folder, seed=1, hidden_size=128, intermediate_size=96, layers=2, max_position=256)
