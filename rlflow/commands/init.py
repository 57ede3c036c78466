"""`rlflow init`: writes a folder with an algorithm, a reward, data, a config, a test and a README, ready to run."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from rlflow.commands.parser import call
from rlflow.errors import UserError, one_line

PROJECT = Path(__file__).parent / "project"


def init(folder: Path, /) -> None:
    """Write a project that trains right away: an algorithm of one page, a reward, data, a config, a test and a README.

    Example:
        rlflow init my_project

    Args:
        folder: A new folder, or an empty one.

    Raises:
        UserError: There is something in the folder, or it cannot be written.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"`{folder}` is there and not empty, and nothing is overwritten; name a new folder")
        shutil.copytree(PROJECT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise UserError(f"`{folder}` cannot be written: {one_line(error)}; name another folder") from error
    print(f"wrote {folder}/: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    print(f"next: cd {shlex.quote(str(folder))} && rlflow fit --config config.yaml")


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow init`."""
    call(init, arguments)
