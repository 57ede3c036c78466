"""A run's files are on the disk whole or not at all, whether written in the background or between steps."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import resource
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import rlflow.checkpoint.writing
from rlflow import checkpoint
from rlflow.callbacks import Callback
from rlflow.errors import UserError
from rlflow.models.optimizer import Optimizer
from rlflow.models.tiny import write_tiny_model
from rlflow.process import status
from rlflow.storage.draft import Draft
from rlflow.storage.safetensors_files import write_tensors
from rlflow.storage.stored_role import StoredRole
from rlflow.trainer import Trainer
from tests.checkpoint.test_checkpoint import StopAfter, content
from tests.controller.runs import FSDP, ZERO2, ZERO3, Fit, Result, failing_fit, fit, grpo, sums
from tests.families.models import write_family
from tests.ranks import RankPool
from tests.slow import slow_but


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("saving") / "tiny", hidden_size=64, layers=1)


def run_of(model: Path, folder: Path, **settings: Any) -> Fit:
    given = {"max_steps": 3, "save_every_n_steps": 1, **settings}
    return Fit(grpo(model), sums(8, 2), folder, ZERO2, settings=given)


class Limits(Callback):
    """From a step on, one rank's files can be no longer than this."""

    def __init__(self, rank: int, after: int, limit: int) -> None:
        self.rank, self.after, self.limit = rank, after, limit

    def on_step_end(self, trainer: Trainer, module: Any, step: int, metrics: Mapping[str, float]) -> None:
        assert trainer.strategy is not None
        if step == self.after and trainer.strategy.global_rank == self.rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))


def failing_fit_then_unlimited(run: Fit) -> str:
    try:
        return failing_fit(run).error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize(
    ("strategy", "async_save"),
    [
        (ZERO3, True),
        pytest.param(ZERO2, False, marks=pytest.mark.slow),
        pytest.param(ZERO2, True, marks=pytest.mark.slow),
        pytest.param(ZERO3, False, marks=pytest.mark.slow),
    ],
)
def test_what_one_rank_cannot_write_is_named_by_all_and_the_last_good_files_stay(
    strategy: Any, async_save: bool, model: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    run = replace(run_of(model, tmp_path / "run", callbacks=[StopAfter(1)]), strategy=strategy)
    ranks2.run(fit, run)
    good = {name: content(tmp_path / "run" / name) for name in ("checkpoint", "model")}
    settings = {**run.settings, "callbacks": [Limits(1, 2, 50_000)], "ckpt_path": "last", "async_save": async_save}
    first, second = ranks2.run(failing_fit_then_unlimited, replace(run, settings=settings))
    assert first == second
    file = "step-00000002.draft/actor-00001" if async_save else "model.draft/model-00002"
    assert f"{file}-of-00002.safetensors cannot be written by rank 1 on " in first
    assert ": File too large; what was saved before is still there: free some space there, and continue with" in first
    assert {name: content(tmp_path / "run" / name) for name in ("checkpoint", "model")} == good
    assert not [path.name for path in (tmp_path / "run").rglob("*.draft")]


def failing_fit_on_a_disk_that_loses(run: Fit) -> tuple[str, bool]:
    """As rank 1 finds it, the end of its own file is gone when models are made from the checkpoint's files.

    Rank 1 says so later than rank 0.

    Returns:
        The error, and whether the folders were there until this rank had said so.
    """
    written_state, report = checkpoint.written_state, Draft.report
    there: list[bool] = []

    def cut(draft: Draft, *given: Any) -> StoredRole:
        stored = written_state(draft, *given)
        (own,) = draft.path.glob("actor-00001-of-*")
        if dist.get_rank() == 1:
            os.truncate(own, own.stat().st_size - 8)
        return stored

    def report_late(draft: Draft, error: BaseException | None, *given: Any, **more: Any) -> None:
        if dist.get_rank() == 1 and error is not None:
            time.sleep(0.3)
            there.append(draft.path.exists())
        report(draft, error, *given, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint, "written_state", cut)
        patched.setattr(Draft, "report", report_late)
        return failing_fit(run).error, all(there)


def test_a_file_that_the_disk_cuts_short_before_it_is_read_back_is_named_by_all(
    model: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    run = replace(run_of(model, tmp_path / "run", callbacks=[StopAfter(1)]), strategy=ZERO3)
    ranks2.run(fit, run)
    good = {name: content(tmp_path / "run" / name) for name in ("checkpoint", "model")}
    settings = {**run.settings, "callbacks": [], "ckpt_path": "last", "async_save": True}
    (first, _), (second, there) = ranks2.run(failing_fit_on_a_disk_that_loses, replace(run, settings=settings))
    assert first == second
    assert there  # removed while a rank writes it, it would keep that rank's file
    assert "\n" not in first
    assert re.search(r"cannot be written by rank [01] on .*step-00000002.draft/actor-00001-of-.* is damaged", first)
    assert "; what was saved before is still there: look at that disk, and continue with" in first
    assert {name: content(tmp_path / "run" / name) for name in ("checkpoint", "model")} == good
    assert not [path.name for path in (tmp_path / "run").rglob("*.draft")]


WAYS: dict[str, tuple[Any, str, Mapping[str, int]]] = {
    "zero2": (ZERO2, "qwen2", {}),
    "zero3": (ZERO3, "qwen2", {}),
    "fsdp": (FSDP, "qwen2", {}),
    "experts": (ZERO3, "qwen3_moe", {}),
    "apart": (ZERO2, "qwen2", {"rollout": 0, "actor": 1}),
}


@pytest.mark.parametrize(
    ("way", "precision"),
    slow_but([("zero3", "bf16"), ("apart", "bf16")], itertools.product(WAYS, ["fp32", "bf16"])),
)
def test_what_async_save_writes_during_steps_is_what_is_written_between_them(
    way: str,
    precision: str,
    model: Path,
    tmp_path: Path,
    ranks2: RankPool,
) -> None:
    strategy, family, placement = WAYS[way]
    if family != "qwen2":
        model = write_family(family, tmp_path / "model")
    for name, async_save in (("waits", False), ("goes on", True)):
        run = run_of(model, tmp_path / name, async_save=async_save, save_last=3, placement=placement)
        ranks2.run(fit, replace(run, strategy=partial(strategy, precision=precision)))
    waits, goes_on = (content(tmp_path / name / "checkpoint") for name in ("waits", "goes on"))
    assert len({path.split("/")[0] for path in waits}) == 3
    assert waits == goes_on
    assert content(tmp_path / "waits/model") == content(tmp_path / "goes on/model")


class KeepsSecond(Callback):
    """After step 4, not saved yet, lets the disk begin and keeps a copy of the save after step 2.

    Args:
        disk: Writes once it is set.
        folder: Folder of the run.
    """

    def __init__(self, disk: threading.Event, folder: Path) -> None:
        self.disk, self.folder = disk, folder

    def on_step_end(self, trainer: Trainer, module: Any, step: int, metrics: Mapping[str, float]) -> None:
        saved = self.folder / "checkpoint/step-00000002"
        assert not (step == 3 and saved.exists() and not self.disk.is_set())
        if step == 4:
            self.disk.set()
            until = time.monotonic() + 60
            while trainer.is_global_zero and not saved.exists():
                assert time.monotonic() < until
                time.sleep(0.01)
            if trainer.is_global_zero:
                shutil.copytree(saved, self.folder / "kept/state")
                shutil.copytree(self.folder / "model", self.folder / "kept/model")


def fit_with_the_second_step_kept(run: Fit) -> Result:
    """On a disk that begins to write after step 4, if the run does not wait for it."""
    disk = threading.Event()
    if not run.settings["async_save"]:
        disk.set()

    def write_later(*given: Any) -> str:
        assert disk.wait(60)
        return write_tensors(*given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rlflow.checkpoint.writing, "write_tensors", write_later)
        settings = {**run.settings, "callbacks": [StopAfter(9), KeepsSecond(disk, run.folder)]}
        return fit(replace(run, settings=settings))


@pytest.mark.row("retention, asynchronous writing")
@pytest.mark.parametrize("strategy", slow_but([ZERO3], [ZERO2, ZERO3, FSDP]))
def test_what_is_written_two_steps_later_is_the_state_of_the_step_that_was_saved(
    strategy: Any, model: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    for name, async_save in (("waits", False), ("goes on", True)):
        run = run_of(model, tmp_path / name, max_steps=4, save_every_n_steps=2, async_save=async_save)
        ranks2.run(fit_with_the_second_step_kept, replace(run, strategy=strategy))
    waits, goes_on = (content(tmp_path / name / "kept") for name in ("waits", "goes on"))
    assert waits == goes_on
    assert {path.split("/")[0] for path in waits} == {"state", "model"}
    for kept, later in (("state", "checkpoint/step-00000004"), ("model", "model")):  # each file of weights has changed
        found = {path: of for path, of in content(tmp_path / "waits" / later).items() if path.endswith(".safetensors")}
        assert found
        assert all(waits[f"{kept}/{path}"] != of for path, of in found.items())


@pytest.mark.parametrize("async_save", [False, True])
def test_who_waits_for_the_run_knows_what_is_saved(model: Path, tmp_path: Path, async_save: bool) -> None:
    fit(run_of(model, tmp_path / "run", save_every_n_steps=2, async_save=async_save))
    assert status.board().resume_advice == "; continue with `--trainer.ckpt_path last`, after step 3"
    fit(run_of(model, tmp_path / "other", save_every_n_steps=None))
    assert status.board().resume_advice == ""


def test_a_file_that_changed_is_named_on_all_ranks_before_a_step_is_made(
    model: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    run = run_of(model, tmp_path / "run", callbacks=[StopAfter(1)])
    ranks2.run(fit, run)
    folder = tmp_path / "run/checkpoint/step-00000001"
    changed = folder / "actor-00001-of-00002.safetensors"
    flipped = bytearray(changed.read_bytes())
    flipped[-1] ^= 1
    changed.write_bytes(flipped)
    before = content(tmp_path / "run")
    for named in ("last", str(folder)):
        results = ranks2.run(failing_fit, replace(run, settings={**run.settings, "ckpt_path": named}))
        (said,) = {result.error for result in results}
        assert f"another SHA-256 of {changed.name} than state.json says" in said
        assert all(not result.weights for result in results)  # nothing was loaded
    assert content(tmp_path / "run") == before


@dataclass(frozen=True)
class Usage:
    """The fields of `shutil.disk_usage` that are read."""

    free: int


@contextlib.contextmanager
def disk_with(free: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: Usage(free))
        yield


class Fills(Callback):
    """The disk is full from a step on."""

    def __init__(self, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.after, self.monkeypatch = after, monkeypatch

    def on_step_end(self, trainer: Trainer, module: Any, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.after:
            self.monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1_500_000))


def alone(model: Path, folder: Path, **settings: Any) -> Fit:
    run = run_of(model, folder, **settings)
    return Fit(run.module, run.data, run.folder, settings=run.settings)


def weights_of(model: Path) -> int:
    header = json.loads((model / "model.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    return sum(of["data_offsets"][1] - of["data_offsets"][0] for name, of in header.items() if name != "__metadata__")


def test_a_disk_without_room_is_seen_before_the_first_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three steps, each saved: two models, and with two checkpoints to be kept three of them, weights and two moments.
    needed = weights_of(model) * (2 + 3 * 3) + 2**20
    with (
        disk_with(needed - 1, monkeypatch),
        pytest.raises(UserError, match=r"left on its disk, and this run saves up to 2 x"),
    ):
        fit(alone(model, tmp_path / "short"))
    assert not (tmp_path / "short/metrics.jsonl").read_text()
    with disk_with(needed, monkeypatch):
        assert len(fit(alone(model, tmp_path / "enough")).steps) == 3


def test_a_disk_that_filled_up_is_seen_at_a_save_and_the_last_good_files_stay(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = alone(model, tmp_path / "run", callbacks=[StopAfter(1)])
    fit(run)
    good = {name: content(tmp_path / "run" / name) for name in ("checkpoint", "model")}
    settings = {**run.settings, "callbacks": [Fills(2, monkeypatch)], "ckpt_path": "last"}
    error = failing_fit(replace(run, settings=settings)).error
    assert "run has 1.5 MB left on its disk, and the models and the checkpoint of this run need" in error
    assert "what was saved before is still there" in error
    assert {name: content(tmp_path / "run" / name) for name in ("checkpoint", "model")} == good


@pytest.mark.parametrize(("name", "kind"), [("Adafactor", "row_var"), ("NAdam", "mu_product")])
def test_an_optimizer_that_keeps_other_shapes_is_refused_in_a_run_that_saves(
    name: str, kind: str, model: Path, tmp_path: Path
) -> None:
    module = grpo(model, optimizer=Optimizer(f"torch.optim.{name}", lr=1e-3))
    run = replace(alone(model, tmp_path / "run"), module=module)
    with pytest.raises(UserError, match=rf"'torch.optim.{name}', which keeps `{kind}` of a weight in another shape"):
        fit(run)
    assert len(fit(replace(run, settings={"max_steps": 1})).steps) == 1


@pytest.mark.parametrize("ckpt_path", ["last", "auto"])
def test_damaged_records_of_a_run_do_not_stop_it_from_going_on(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], ckpt_path: str
) -> None:
    folder, names = tmp_path / "run", ("metrics.jsonl", "samples.jsonl", "metrics.csv")
    run = alone(model, folder, callbacks=[StopAfter(2)])
    fit(run)
    for name in names:
        (folder / name).write_bytes(bytes(64) + (folder / name).read_bytes())
    fit(replace(run, settings={**run.settings, "callbacks": [], "ckpt_path": ckpt_path}))
    told = capfd.readouterr().out
    for name in names:
        assert told.count(f"warning: {folder}/{name} is damaged: ") == 1
        assert (folder / f"{name}.damaged").read_bytes()[:64] == bytes(64)
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [2, 3]  # line 1 was that of step 1
