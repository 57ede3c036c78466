"""What a run leaves behind, and where: one folder, written by rank 0."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rlflow.errors import UserError, one_line
from rlflow.process.status import SUPERVISED_VARIABLE
from rlflow.run.folder_lock import LOCK

TRIES = 100  # of making a folder where one is that says there is none


def seconds_since_process_start() -> float:
    """Wall-clock seconds since this process began, or the one that it was forked from; its imports included."""
    began = psutil.Process(os.getppid() if SUPERVISED_VARIABLE in os.environ else os.getpid())
    return time.time() - began.create_time()


def require_folder(path: Path) -> None:
    """Refuse a folder that a run's results cannot go into; whether it can be made is tried, and nothing stays of it.

    Args:
        path: The run's.

    Raises:
        UserError: It cannot be made or written, or something that is no folder lies there.
    """
    said = f"`trainer.run_dir` is {str(path)!r:.80}"
    try:
        if path.parts[0].startswith("~"):
            raise UserError(f"{said}, and `{path.parts[0]}` means a home in a shell alone; write the whole path")
        left = TRIES
        while (found := _mode(path)) is None:
            missing = next((each for each in path.parents[::-1] if _mode(each) is None), path)
            if missing.is_symlink():
                raise UserError(f"{said}, a link to what is not there; name a folder")
            try:  # under another name: ranks look at the same time, and none may see a folder come and go
                Path(tempfile.mkdtemp(prefix=".rlflow-", dir=missing.parent)).rmdir()
                return
            except (
                FileNotFoundError
            ):  # a run that was refused has removed what it had made, and another may make it anew
                left -= missing.parent.is_dir()
                if not left:  # it is there, and takes no folders, such as `/proc`
                    raise
        if not stat.S_ISDIR(found):
            raise UserError(f"{said}, where a file lies; name a folder")
        elif not os.access(path, os.W_OK | os.X_OK):
            raise UserError(f"{said}, which cannot be written; name a folder that can be")
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise UserError(f"{said}, which cannot be made ({reason}); name a folder that can be written") from error


def from_here(path: Path) -> Path:
    """A path for a line to the user: from the folder where this process is, if it lies there."""
    with suppress(FileNotFoundError, ValueError):  # that folder is gone, or the path lies elsewhere
        return path.relative_to(Path.cwd())
    return path


def _mode(path: Path) -> int | None:
    """Of what lies at the path; None if nothing does."""
    with suppress(FileNotFoundError):
        return path.stat().st_mode
    return None


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run's results.

    Attributes:
        path: The folder; its name is the run's.
    """

    path: Path

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An empty folder at `path`; what lay there before is kept as `<path>-1`, `-2`, ..."""
        if path.exists() and any(each.name != LOCK for each in path.iterdir()):
            number = 1
            while (kept := path.with_name(f"{path.name}-{number}")).exists():
                number += 1
            path.rename(kept)
        path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def inputs(self) -> Path:
        """What nodes read in some steps, see `rlflow.controller.inputs`."""
        return self.path / "inputs"

    @property
    def model(self) -> Path:
        """The trained model in Hugging Face form, with its tokenizer."""
        return self.path / "model"

    def model_of(self, role: str) -> Path:
        """As `model`, of a trained role that the rollout engine does not follow, such as the critic."""
        return self.path / f"model-{role}"

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint, in a folder named by its step."""
        return self.path / "checkpoint"

    @property
    def logs(self) -> Path:
        """What libraries print, a file for each rank."""
        return self.path / "logs"

    @property
    def traces(self) -> Path:
        """The ranks' task traces, and `trace.json`, all of them in one, where `rlflow trace` has joined them."""
        return self.path / "traces"

    @property
    def validation(self) -> Path:
        """The metrics of `rlflow validate`."""
        return self.path / "validation.json"

    @property
    def summary(self) -> Path:
        """The run in a few numbers."""
        return self.path / "summary.json"

    def write_summary(self, numbers: dict[str, Any], started_from: Path) -> dict[str, Any]:
        """Write `summary.json`; a run that started from another run's model carries on its `seconds`.

        Args:
            numbers: Of this run.
            started_from: The model that training started from.
        """
        run_before = RunFolder(started_from.parent)
        carries_on = started_from == run_before.model and run_before.summary.is_file()
        earlier = _seconds_of(run_before.summary) if carries_on else {}
        seconds = earlier | {self.path.name: round(seconds_since_process_start(), 1)}
        summary = numbers | {"seconds": seconds}
        self.summary.write_text(json.dumps(summary, indent=2) + "\n")
        return summary


def _seconds_of(summary: Path) -> dict[str, float]:
    """What an earlier run took, by name; of a damaged summary nothing, for the run that asks is done."""
    try:
        return {str(name): float(value) for name, value in json.loads(summary.read_text())["seconds"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        print(f"warning: {summary} is damaged ({one_line(error)}), so this run's summary has not the times of that one")
        return {}
