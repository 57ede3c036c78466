"""Runs on a small file system that fills up while a checkpoint is written; started in a mount of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rlflow.errors import UserError
from rlflow.models.tiny import write_tiny_model
from rlflow.storage.draft import Draft
from tests.controller.runs import Fit, StopsAfter, failing_fit, fit, grpo, sums

SHARES = (0.0, 0.02, 0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97)  # of what a save takes: what is left of the disk


def tried(model: Path, folder: Path, share: float) -> dict[str, Any]:
    """The output of a run whose disk has this much left at its second save, and whether the first save is good."""
    ballast = folder.with_name("ballast")

    def run(**settings: Any) -> Fit:
        return Fit(grpo(model), sums(8, 2), folder, settings={"max_steps": 3, "save_every_n_steps": 1, **settings})

    fit(run(callbacks=[StopsAfter(1)]))
    good = content(folder)
    size = sum(len(each) for each in good.values())

    def fills(draft: Draft) -> None:
        original(draft)
        if draft.target.name == "step-00000002":  # the last that is begun; room was looked for before
            free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, free - int(share * size))

    original = Draft.open
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Draft, "open", fills)
        try:
            error = failing_fit(run(ckpt_path="last")).error
        except (OSError, UserError) as other:
            error = f"{type(other).__name__}: {other}"
    is_good = content(folder) == good and not list(folder.rglob("*.draft"))
    ballast.unlink()
    return {"error": error, "is_good": is_good, "went_on": len(fit(run(ckpt_path="last")).steps)}


def content(folder: Path) -> dict[str, bytes]:
    """Content of model and checkpoints."""
    kept = [path for name in ("model", "checkpoint") for path in sorted((folder / name).rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    tiny = write_tiny_model(place / "tiny", hidden_size=64, layers=1)
    found = {}
    for share in SHARES:
        (place / f"{share}").mkdir()
        found[share] = tried(tiny, place / f"{share}" / "run", share)
    print(json.dumps(found))
