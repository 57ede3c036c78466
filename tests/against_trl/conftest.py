"""Fixtures: the models, and TRL in a process of its own, since it imports vLLM and sets its environment."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from tests.against_trl.cases import Models, Result, write_models

TheirResult = Callable[..., Result]


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The four models."""
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="package")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TheirResult]:
    """`trl("grpo", models, ...)`: what that function of `trl_trainers` returns."""
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed; it is in requirements/dev.in")
    with ProcessPoolExecutor(1, get_context("spawn")) as process:

        def call(name: str, *arguments: Any, **settings: Any) -> Result:
            scratch = tmp_path_factory.mktemp("trl")
            return process.submit(_call, name, scratch, *arguments, **settings).result()

        yield call


def _call(name: str, *arguments: Any, **settings: Any) -> Result:
    from tests.against_trl import trl_trainers

    result: Result = getattr(trl_trainers, name)(*arguments, **settings)
    return result
