"""A training of the benchmark: its run, the place of its results, and their values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
CODE = ("rlflow", "algorithms", "benchmarks/learning")
SEEDS = (0, 1, 2)
Record = Mapping[str, float]


@dataclass(frozen=True)
class Task:
    """One training with several seeds.

    Attributes:
        name: Name of its folder under `runs`.
        config: The file that it reads, from the root of the project.
        start: Arguments of Python that start it, before `--config`, `--seed` and `--trainer.run_dir`.
        needs: Tasks whose models it starts from.
        seeds: Seeds of its runs.
    """

    name: str
    config: str
    start: tuple[str, ...] = ("-m", "rlflow.cli", "fit")
    needs: tuple[Task, ...] = ()
    seeds: tuple[int, ...] = SEEDS

    def folder(self, seed: int) -> Path:
        """Folder of a run's results."""
        return ROOT / "runs" / self.name / str(seed)

    def command(self, seed: int) -> list[str]:
        """Arguments of Python."""
        return [
            *(*self.start, "--config", self.config),
            *("--seed", str(seed), "--trainer.run_dir", str(self.folder(seed).relative_to(ROOT))),
        ]

    def mark(self, seed: int) -> str:
        """Digest of the inputs of a run: its command, its config and the configs of the runs that it starts from."""
        settings = yaml.safe_load((ROOT / self.config).read_text(encoding="utf-8"))
        parts = [*self.command(seed), json.dumps(settings), *(need.mark(SEEDS[0]) for need in self.needs)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def marked(self, seed: int) -> Path:
        """The file that a finished run's mark is written to."""
        return self.folder(seed).with_suffix(".finished")

    def finished(self, seed: int) -> bool:
        """Whether a run by this command and config came to its end."""
        return self.marked(seed).exists() and self._marks(seed)[0] == self.mark(seed)

    def of_other_code(self) -> bool:
        """Whether a finished run was made by other code than there is; it stands until somebody removes its mark."""
        return any(self.finished(seed) and self._marks(seed)[1:] != [code()] for seed in self.seeds)

    def _marks(self, seed: int) -> list[str]:
        return self.marked(seed).read_text(encoding="utf-8").splitlines()

    def complete(self) -> bool:
        """Whether every seed's run is finished."""
        return all(self.finished(seed) for seed in self.seeds)


@dataclass(frozen=True)
class Start(Task):
    """A training that others start from: run once, by its config alone, in the folder that theirs name."""

    seeds: tuple[int, ...] = (0,)

    def folder(self, seed: int) -> Path:
        return ROOT / "runs" / self.name

    def command(self, seed: int) -> list[str]:
        return [*self.start, "--config", self.config]


@cache
def code() -> str:
    """A digest of all that trains."""
    files = [file for name in CODE for file in sorted((ROOT / name).rglob("*.py"))]
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


def records(folder: Path) -> list[Record]:
    """The metrics of a run by step, those of the validation before the first step among them."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def curve(of_run: list[Record], metric: str) -> list[tuple[float, float]]:
    """A metric by step, where it was recorded."""
    return [(record["step"], record[metric]) for record in of_run if metric in record]


def tenths(of_run: list[Record], metric: str) -> tuple[float, float]:
    """Means of a metric over the first and the last tenth of the steps that recorded it."""
    found = [value for _, value in curve(of_run, metric)]
    tenth = max(1, len(found) // 10)
    return sum(found[:tenth]) / tenth, sum(found[-tenth:]) / tenth
