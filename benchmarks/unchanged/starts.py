"""The inputs of configs, made once by the base and the same for both revisions: models and word problems."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.unchanged.execution import python
from benchmarks.unchanged.revisions import Revision

# Folder under `runs`, as configs name it, with the config and options that make its model. The teacher is another
# student; a step of sums has 64 rows, which takes a minute in all.
SUMS = ("--trainer.devices", "1", "--data.prompts_per_step", "64", "--trainer.limit_val_batches", "1")
FEW = ("--trainer.devices", "1", "--trainer.max_steps", "60", "--trainer.limit_val_batches", "1")
MODELS = {
    "learn/sft": ("learn/sft",),
    "quickstart/sft": ("quickstart_sft", *SUMS, "--trainer.max_steps", "500", "--seed", "0"),
    "quickstart/grpo": ("quickstart_sft", *SUMS, "--trainer.max_steps", "600", "--seed", "1"),
    **{name: (name, *FEW) for name in ("agent_sft", "agent_guess_sft", "stones_sft", "proposer_sft", "hinted_sft")},
}
PROBLEMS = "word_problems"


def of(base: Revision) -> Path:
    """The folder that stands for `runs` in each run."""
    return base.folder / "starts"


def made(base: Revision, jobs: int) -> Path:
    """Like `of`, after making what is missing; nothing is made twice."""
    makers: dict[str, Callable[[Path], list[str]]] = {name: _training(base, *recipe) for name, recipe in MODELS.items()}
    makers[PROBLEMS] = lambda draft: ["-m", "benchmarks.word_problems", "write", "--folder", str(draft)]
    missing = [name for name in makers if not (of(base) / name).exists()]
    with ThreadPoolExecutor(jobs) as pool:
        failed = [line for line in pool.map(lambda name: _make(base, name, makers[name]), missing) if line]
    if failed:
        sys.exit("\n".join(failed))
    return of(base)


def complete(base: Revision) -> bool:
    """Whether nothing is missing."""
    return all((of(base) / name).exists() for name in (*MODELS, PROBLEMS))


def digest(starts: Path) -> str:
    """Digest of the inputs of runs: weights and problems."""
    found = hashlib.sha256()
    read = [*(starts / name / "model" / "model.safetensors" for name in MODELS), starts / PROBLEMS / "problems.jsonl"]
    for path in read:
        found.update(str(path.relative_to(starts)).encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _training(base: Revision, config: str, *arguments: str) -> Callable[[Path], list[str]]:
    settings = str(base.code / "configs" / f"{config}.yaml")
    command = [str(base.command), "fit", "--config", settings, *arguments, "--trainer.run_dir"]
    return lambda draft: [*command, str(draft)]


def _make(base: Revision, name: str, arguments: Callable[[Path], list[str]]) -> str | None:
    place = of(base) / name
    draft = place.with_name(f"{place.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.parent.mkdir(parents=True, exist_ok=True)
    print(f"{base.name}: makes {name}, which others start from", flush=True)
    log = place.with_name(f"{place.name}.log")
    if code := python(base, arguments(draft), base.folder, log):
        return f"{place} was not made, exit code {code}: see {log}"
    draft.rename(place)
    return None
