"""Models in configs and options: by name, by arguments, and by class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow import CausalLM
from rlflow.commands.fit import read_fit
from tests.own_folder import forgotten, make, write


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    with forgotten(tmp_path):
        yield tmp_path


def actor_of(*options: str) -> CausalLM:
    actor: CausalLM = read_fit(["--config", "my.yaml", *options]).module.actor
    return actor


@pytest.mark.parametrize(
    "written",
    [
        "folder/model-2.5",
        {"model": "folder/model-2.5"},
        {"class_path": "rlflow.CausalLM", "init_args": {"model": "folder/model-2.5"}},
    ],
)
def test_a_model_is_written_by_name_by_settings_or_by_class(written: Any, folder: Path) -> None:
    write(folder / "my.yaml", {"module.init_args.actor": written})
    assert actor_of().model == "folder/model-2.5"
    assert actor_of("--module.actor.optimizer.lr", "0.5").optimizer.lr == 0.5  # type: ignore[union-attr]


@pytest.mark.parametrize("option", ["--module.actor", "--module.init_args.actor", "--module.actor.model"])
@pytest.mark.parametrize("apart", [True, False])
def test_an_option_names_another_model_and_leaves_its_settings(option: str, apart: bool, folder: Path) -> None:
    write(folder / "my.yaml", {"module.init_args.actor": {"model": "tiny", "epochs": 3}})
    actor = actor_of(*((option, "other") if apart else (f"{option}=other",)))
    assert (actor.model, actor.epochs) == ("other", 3)


def test_a_later_config_names_another_model_and_leaves_its_settings(folder: Path) -> None:
    write(folder / "my.yaml", {"module.init_args.actor": {"model": "tiny", "epochs": 3}})
    (folder / "later.yaml").write_text("module: {init_args: {actor: other}}\n")
    actor = actor_of("--config", "later.yaml")
    assert (actor.model, actor.epochs) == ("other", 3)
