"""Runs of a revision's cases; those that are finished are not run again."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.unchanged import starts
from benchmarks.unchanged.cases import Case
from benchmarks.unchanged.execution import python
from benchmarks.unchanged.record import Values, values_of
from benchmarks.unchanged.renamed import with_defaults
from benchmarks.unchanged.revisions import Revision
from benchmarks.unchanged.shortened import shortened


@dataclass(frozen=True)
class Runs:
    """Runs of one revision from given models.

    Attributes:
        revision: Revision whose code runs.
        starts: Folder that stands for `runs` in each.
        names: New names of keys and classes, by the base's.
        defaults: Values that the base sets where a config says nothing, see `renamed.DEFAULTS`.
    """

    revision: Revision
    starts: Path
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Folder of the records."""
        return self.revision.folder / f"from-{starts.digest(self.starts)}"

    def record(self, case: Case) -> dict[str, Any] | None:
        """The record of a finished run; None if it is not finished, or its inputs have changed."""
        path = self.folder / f"{case.name}.json"
        if not path.exists() or self.settings(case, Path()) is None:
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found if found["mark"] == self.mark(case) else None

    def values(self, case: Case) -> Values | None:
        """All numbers of a finished run."""
        found = self.record(case)
        return None if found is None else found["values"]

    def settings(self, case: Case, run: Path) -> Any | None:
        """A run's settings; None if the revision has no such config."""
        path = self.revision.code / "configs" / f"{case.config}.yaml"
        if not path.exists():
            return None
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        return with_defaults(shortened(settings, case, run, self.names), self.defaults)

    def mark(self, case: Case) -> str:
        """Digest of the way in which a run is made, without its code and its starting model."""
        return hashlib.sha256(json.dumps([case.name, self.settings(case, Path())]).encode()).hexdigest()


def run_all(runs: Runs, cases: Iterable[Case], jobs: int) -> list[str]:
    """Every case that is not finished, the quick ones first; a line for each that failed.

    Args:
        runs: Runs of one revision.
        cases: Cases to run.
        jobs: Runs at a time.
    """
    missing = sorted((case for case in cases if runs.record(case) is None), key=lambda case: case.effort)
    runs.folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        return [line for line in pool.map(lambda case: train(runs, case), missing) if line is not None]


def train(runs: Runs, case: Case) -> str | None:
    """One run, whose record is written at its end; None, or what went wrong."""
    name, started = f"{runs.revision.name}: {case.name}", time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"{case.name}-", dir=runs.folder))
    settings = runs.settings(case, folder / "run")
    if settings is None:
        folder.rmdir()
        return f"{name}: no such config"
    (folder / "runs").symlink_to(runs.starts)
    config, log = folder / "config.yaml", folder / "printed.log"
    config.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    if code := python(runs.revision, [str(runs.revision.command), "fit", "--config", str(config)], folder, log):
        return f"{name} ended with {code}: see {log}"
    imported = sorted(set((folder / "printed.imported").read_text(encoding="utf-8").split()))
    foreign = [path for path in imported if not Path(path).is_relative_to(runs.revision.code)]
    assert not foreign, f"{name} imported {foreign}"
    seconds = round(time.monotonic() - started, 1)
    made = {"mark": runs.mark(case), "seconds": seconds, "imported": imported, "values": values_of(folder / "run")}
    draft = folder / "record.json"
    draft.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    draft.rename(runs.folder / f"{case.name}.json")
    shutil.rmtree(folder)
    print(f"{name}: {seconds:.0f} s", flush=True)
    return None
