"""Data that loggers get at the start of a run, and the last lines of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlflow.algorithms import SFT
from rlflow.loggers import TensorBoardLogger, WandbLogger
from rlflow.run.folder import RunFolder
from rlflow.run.recording import closing_lines
from rlflow.trainer import Trainer
from tests.algorithm_factory import made
from tests.controller.runs import answers
from tests.loggers.test_lightning import Recorded
from tests.run.test_code_state import git, repository

__all__ = ["repository"]


def test_a_run_says_what_joins_its_traces(tmp_path: Path) -> None:
    folder, summary = RunFolder(tmp_path), {"steps": 2, "seconds": {"run": 1.0}}
    assert "traces/ (`rlflow trace`)" in closing_lines(folder, summary)[-1]


def train(policy: Path, folder: Path, steps: int = 1, logs_hparams: bool = True, **settings: Any) -> None:
    """Train on four rows by a module of rlflow's, so that the repository of the working directory counts."""
    module = made(SFT, policy)
    module.save_hyperparameters({"lucky": 7}, logger=logs_hparams)
    Trainer(str(folder), max_steps=steps, accelerator="cpu", **settings).fit(module, answers([1, 2, 3, 4], 2))


@pytest.mark.parametrize("logs_hparams", [True, False])
def test_every_logger_has_the_commit_the_versions_and_the_graph(
    policy: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory, logs_hparams: bool
) -> None:
    folder, commit = tmp_path_factory.mktemp("runs") / "run", git(repository, "rev-parse", "HEAD").strip()
    loggers = [WandbLogger(mode="offline"), TensorBoardLogger(), CSVLogger(folder / "csv")]
    train(policy, folder, logs_hparams=logs_hparams, logger=loggers)
    code = {"repository": str(repository), "commit": commit, "changed": False}
    (noted,) = map(json.loads, (folder / "code.jsonl").read_text().splitlines())
    assert noted["code"] == code
    assert {"torch", "transformers", "lightning"} <= noted["versions"].keys()
    recorded = Recorded(folder)
    hparams = [yaml.safe_load(file.read_text()) for file in folder.rglob("hparams.yaml")]
    assert len(hparams) == 2
    for config in (recorded.config, *hparams):
        assert (config["code"], config["versions"]) == (code, noted["versions"])
        assert ("lucky" in config) == logs_hparams
    shown = "actor_loss  actor  MODEL_TRAIN"
    (html,) = (folder / "wandb").rglob("*.html")
    assert shown in html.read_text()
    assert [each["graph._type"] for each in recorded.history if "graph._type" in each] == ["html-file"]
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    (drawn,) = events.Tensors("graph/text_summary")
    assert shown in drawn.tensor_proto.string_val[0].decode()
    assert (folder / "graph.md").read_text().startswith("```mermaid\nflowchart TD")
    assert shown in (folder / "graph.md").read_text()


def test_a_run_resumes_at_another_commit_without_a_message_and_records_both(
    policy: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.mktemp("runs") / "run"
    settings = {"save_every_n_steps": 1, "ckpt_path": "auto", "logger": "tensorboard"}
    train(policy, folder, 1, **settings)
    first = git(repository, "rev-parse", "HEAD").strip()
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "second")
    capfd.readouterr()
    train(policy, folder, 2, **settings)
    second = git(repository, "rev-parse", "HEAD").strip()
    said = capfd.readouterr().out
    assert "after step 1" in said
    assert "commit" not in said
    noted = map(json.loads, (folder / "code.jsonl").read_text().splitlines())
    assert [each["code"]["commit"] for each in noted] == [first, second]
