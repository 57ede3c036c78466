"""A checkpoint is on the disk whole or not at all; a damaged one is found and skipped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow import checkpoint
from rlflow.errors import UserError
from rlflow.models.optimizer import Optimizer
from rlflow.models.tiny import write_tiny_model
from rlflow.strategies import SingleProcess
from tests.checkpoint_files import write_checkpoint
from tests.controller.runs import Fit, failing_fit, fit, grpo, sums
from tests.faults import full_disk
from tests.strategies.strategy_update import trained

pytestmark = pytest.mark.row("atomic checkpoints")

PROJECT = Path(__file__).parents[2]
NEWEST, OLDER = "step-00000003", "step-00000002"


def flipped(at: float) -> Callable[[Path], None]:
    """Turns over one bit, so far into the file."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(at * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return damage


def truncated(to: float) -> Callable[[Path], None]:
    """Cuts the file off, so far into it."""
    return lambda path: os.truncate(path, int(to * path.stat().st_size))


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"flipped at {at:.0%}": flipped(at) for at in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)},
    **{f"cut off at {to:.0%}": truncated(to) for to in (0.0, 0.3, 0.99)},
    "grown by a byte": grown,
    "deleted": Path.unlink,
}
REAL = ("flipped at 50%", "cut off at 30%", "cut off at 0%", "deleted")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("atomic") / "tiny", hidden_size=64, layers=1)


def run_of(model: Path, folder: Path, **settings: object) -> Fit:
    data = sums(8, 2)
    return Fit(grpo(model), data, folder, settings={"max_steps": 3, "save_every_n_steps": 1, **settings})


@pytest.fixture(scope="module")
def written(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with the checkpoints of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("written") / "run"
    fit(run_of(model, folder))
    return folder


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "run"))


def damage_of(folder: Path) -> str | None:
    changed = checkpoint.changed_files(folder, 0, 1) if checkpoint.lacks(folder) is None else ()
    return checkpoint.lacks(folder) or next(iter(changed), None)


def test_every_damage_to_every_file_is_found_and_named(copied: Path, seen: Callable[[str], None]) -> None:
    folder, tried = copied / "checkpoint" / NEWEST, 0
    files = sorted(path for path in folder.iterdir())
    assert len(files) == 4  # the manifest, the index, the tensors, what was logged
    assert damage_of(folder) is None
    for path in files:
        good = path.read_bytes()
        for name, damage in DAMAGES.items():
            damage(path)
            found = damage_of(folder)
            assert found is not None, (path.name, name)
            assert path.name in found, (path.name, name)
            assert checkpoint.find("last", copied, damage_of).name == OLDER
            path.write_bytes(good)
            tried += 1
    seen(f"{tried} damages to files found, named and passed over")


def test_every_byte_of_the_manifest_counts(copied: Path) -> None:
    path = copied / "checkpoint" / NEWEST / checkpoint.STATE
    good = path.read_bytes()
    for place in range(0, len(good), 7):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        if (found := checkpoint.lacks(path.parent)) is None:  # the last digit of a number may change nothing
            assert json.loads(path.read_bytes()) == json.loads(good), place
        else:
            assert found == "a state.json that is not what was written", place


@pytest.mark.slow
@pytest.mark.parametrize("damage", REAL)
@pytest.mark.parametrize("name", ["actor-00000-of-00001.safetensors", "actor.json", "state.json"])
def test_a_run_resumes_from_the_older_checkpoint_and_says_so_in_a_line(
    name: str, damage: str, model: Path, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damaged = copied / "checkpoint" / NEWEST
    DAMAGES[damage](damaged / name)
    (copied / "checkpoint/step-00000004.draft").mkdir()  # of a run that was killed while it wrote
    results = fit(run_of(model, copied, ckpt_path="last"))
    assert len(results.steps) == 1  # the third
    lines = [line for line in capfd.readouterr().out.splitlines() if NEWEST in line]
    assert len(lines) == 1, lines
    assert name in lines[0]
    assert lines[0].endswith(f"so it is passed over for {OLDER}")
    assert sorted(path.name for path in (copied / "checkpoint").iterdir()) == [OLDER, NEWEST]
    assert damage_of(damaged) is None


def test_a_run_whose_checkpoints_are_all_damaged_says_of_each_what_it_has(model: Path, copied: Path) -> None:
    (copied / "checkpoint" / NEWEST / "actor.json").unlink()
    flipped(0.5)(copied / "checkpoint" / OLDER / "actor-00000-of-00001.safetensors")
    said = failing_fit(run_of(model, copied, ckpt_path="last"))
    assert f"has no checkpoint that is whole ({NEWEST} has no actor.json; {OLDER} has another SHA-256 of" in said.error
    assert not said.weights  # nothing was loaded


def test_a_damaged_checkpoint_that_is_given_by_its_folder_is_refused(copied: Path) -> None:
    folder = copied / "checkpoint" / NEWEST
    (folder / checkpoint.STATE).write_text((folder / checkpoint.STATE).read_text()[:100])
    with pytest.raises(UserError, match=r"which has a state\.json that is not what was written; give a checkpoint's"):
        checkpoint.find(str(folder), copied)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Files that are synced, renamed and removed, in order; a file's size and time are those at its sync."""
    events: list[tuple[str, str]] = []
    fsync, rename, rmtree = os.fsync, Path.rename, shutil.rmtree

    def waits(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(("sync", f"{path} {path.stat().st_mtime_ns if path.is_file() else ''}".strip()))
        fsync(descriptor)

    def renames(path: Path, target: Path) -> Path:
        if path.name.endswith(".draft"):
            for file in path.iterdir():
                assert ("sync", f"{file} {file.stat().st_mtime_ns}") in events, (
                    f"{file} was written after it was synced"
                )
            assert ("sync", str(path)) in events
        events.append(("rename", str(target)))
        return rename(path, target)

    def removes(path: Path, **more: bool) -> None:
        events.append(("remove", str(path)))
        rmtree(path, **more)

    monkeypatch.setattr(os, "fsync", waits)
    monkeypatch.setattr(Path, "rename", renames)
    monkeypatch.setattr(shutil, "rmtree", removes)
    return events


def test_files_are_on_the_disk_before_the_name_and_the_name_before_older_ones_go(
    model: Path, tmp_path: Path, synced: list[tuple[str, str]]
) -> None:
    strategy = SingleProcess()
    strategy.setup_role("actor", trained(model, Optimizer("adamw", lr=1e-2)), model)
    for step in (1, 2, 3):
        synced.clear()
        write_checkpoint(strategy, tmp_path, step)
    folder = tmp_path / "checkpoint"
    named = synced.index(("rename", str(folder / NEWEST)))
    entered = synced.index(("sync", str(folder)), named)
    removed = synced.index(("remove", str(folder / "step-00000001")))
    assert named < entered < removed
    assert ("sync", str(tmp_path)) in synced[named:removed]  # the entry of `checkpoint` itself


@pytest.mark.slow
def test_a_disk_that_is_full_while_a_rank_writes_leaves_the_last_good_one(
    tmp_path: Path, seen: Callable[[str], None]
) -> None:
    mounts = ["unshare", "--user", "--map-root-user", "--mount"]
    inside = (
        f"mount -t tmpfs -o size=256m none {tmp_path} && exec {sys.executable} -m tests.faults.full_disk {tmp_path}"
    )
    if subprocess.run([*mounts, "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a file system of its own")
    ended = subprocess.run([*mounts, "sh", "-c", inside], cwd=PROJECT, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-3000:]
    tried = json.loads(ended.stdout.splitlines()[-1])
    assert len(tried) == len(full_disk.SHARES) == 10
    for share, found in tried.items():
        assert found["error"].count("\n") == 0
        assert "No space left on device; what was saved before is still there" in found["error"], (share, found)
        assert found["is_good"], share
        assert found["went_on"] == 2, share
    seen(f"a disk full at {len(tried)} sizes")
