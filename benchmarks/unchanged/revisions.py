"""A revision's code in a folder of its own, laid out as the wheel installs it, so that nothing else is imported."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("rlflow", "algorithms", "configs", "benchmarks/learning", "benchmarks/word_problems.py", "setup.py")
INSIDE = ("algorithms", "configs")  # installed inside `rlflow`
COMMAND = '''"""Starts the command line beside this file, and notes where each process takes the package from."""

import importlib.util
import os

import rlflow
from {module} import {function}

if __name__ == "__main__":
    with open(os.environ["UNCHANGED_IMPORTED"], "a", encoding="utf-8") as file:
        file.write(f"{{rlflow.__file__}}\\n{{importlib.util.find_spec('rlflow.algorithms').origin}}\\n")
    {function}()
'''


@dataclass(frozen=True)
class Revision:
    """Code that trains, apart from any checkout.

    Attributes:
        name: Name in the table.
        folder: Folder of this code's runs; named by the digest of the code.
    """

    name: str
    folder: Path

    @property
    def code(self) -> Path:
        """The folder from which code is imported."""
        return self.folder / "code"

    @property
    def command(self) -> Path:
        """The script that starts the command line."""
        return self.code / "command.py"


def committed(revision: str, runs: Path) -> Revision:
    """A commit's code.

    Args:
        revision: Revision as git takes it.
        runs: The folder of all revisions.
    """
    sha = git("rev-parse", "--short", f"{revision}^{{commit}}").decode().strip()
    there = set(git("ls-tree", "-r", "--name-only", sha, *CODE).decode().splitlines())
    with tarfile.open(fileobj=io.BytesIO(git("archive", sha))) as archive:
        files = {file.name: archive.extractfile(file).read() for file in archive if file.name in there}  # type: ignore[union-attr]
    return placed(sha, files, runs)


def present(runs: Path) -> Revision:
    """The working tree's code as it is now, what is not committed included."""
    names = git("ls-files", "--cached", "--others", "--exclude-standard", "--", *CODE).decode().splitlines()
    files = {name: (ROOT / name).read_bytes() for name in sorted(set(names)) if (ROOT / name).is_file()}
    return placed("present", files, runs)


def placed(name: str, files: dict[str, bytes], runs: Path) -> Revision:
    """A revision of these files; where it is there already, nothing is written.

    Args:
        name: Name in the table.
        files: Contents by path from the root of the project.
        runs: The folder of all revisions.
    """
    revision = Revision(name, runs / digest(files))
    if revision.code.exists():
        return revision
    revision.folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=revision.folder))
    for path, content in files.items():
        inside = [f"rlflow/{path}"] if path.split("/")[0] in INSIDE else []
        for place in (path, *inside):
            (draft / place).parent.mkdir(parents=True, exist_ok=True)
            (draft / place).write_bytes(content)
    module, function = entry_point(files["setup.py"].decode())
    (draft / "command.py").write_text(COMMAND.format(module=module, function=function), encoding="utf-8")
    try:
        draft.rename(revision.code)
    except OSError:  # another proof has placed it meanwhile
        shutil.rmtree(draft)
    return revision


def git(*arguments: str) -> bytes:
    """The output of git."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def digest(files: dict[str, bytes]) -> str:
    """Digest of names and contents."""
    found = hashlib.sha256()
    for name, content in sorted(files.items()):
        found.update(f"{name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:12]


def entry_point(setup: str) -> tuple[str, str]:
    """Module and function of the command `rlflow`, as `setup.py` says."""
    found = re.search(r"rlflow = ([\w.]+):(\w+)", setup)
    assert found is not None, "no console script `rlflow` in setup.py"
    return found[1], found[2]
