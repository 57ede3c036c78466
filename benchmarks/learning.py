"""Does every algorithm learn? Trains each by its config with three seeds, and writes the table and the curves.

    make quickstart                      # the model that the others start from, and the teacher of distillation
    python benchmarks/learning.py        # about half an hour on 2 cores, two runs at a time

Measured is the gain of each run: its validation after training less before, on held-out problems. The standard error
is that of the mean gain over seeds, s / sqrt(3) with the unbiased s. What is written: `docs/learning.md` between its
marks, and `docs/pictures/learning.svg`. With `--table` the runs that are there are only summed up.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "learning"
PAGE, PICTURE = ROOT / "docs" / "learning.md", ROOT / "docs" / "pictures" / "learning.svg"
BEGIN, END = "<!-- table: benchmarks/learning.py -->", "<!-- end of table -->"
SEEDS = (0, 1, 2)
ACCURACY = "val/accuracy"


@dataclass(frozen=True)
class Claim:
    """What a config's runs must show.

    Attributes:
        config: The name of its file.
        validated: The validation metric that must rise.
        trained: A metric of training that must move besides, from the mean of its first tenth to that of its last.
        falls: Whether it must fall.
        beside: A config whose mean of it over all steps must be smaller, instead of the move.
    """

    config: str
    validated: str = ACCURACY
    trained: str | None = None
    falls: bool = False
    beside: str | None = None


CLAIMS = (
    Claim("quickstart_sft"),
    Claim("grpo"),
    Claim("grpo_lora"),
    Claim("dr_grpo"),
    Claim("dapo", trained="actor/useful_share", beside="grpo"),
    Claim("rloo"),
    Claim("opo"),
    Claim("remax"),
    Claim("reinforce_plus_plus"),
    Claim("reinforce_plus_plus_baseline"),
    Claim("gspo"),
    Claim("cispo"),
    Claim("gmpo"),
    Claim("cpgd"),
    Claim("gpg"),
    Claim("maxrl"),
    Claim("gdpo"),
    Claim("sapo"),
    Claim("dppo"),
    Claim("off_policy_sequence_masking"),
    Claim("reinforce"),
    Claim("ppo", trained="critic/explained_variance"),
    Claim("on_policy_distillation", trained="actor/teacher_kl", falls=True),
    Claim("dpo", "val/margin", trained="actor/margin"),
    Claim("reward_model_training"),
)


def main() -> None:
    """Run, and sum up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of configs; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    chosen = [claim for claim in CLAIMS if not arguments.only or claim.config in arguments.only]
    if not arguments.table:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for line in pool.map(train, *zip(*((claim, seed) for claim in chosen for seed in SEEDS), strict=True)):
                print(line, flush=True)
    there = [claim for claim in CLAIMS if all((folder(claim, seed) / "summary.json").exists() for seed in SEEDS)]
    lines = table(there)
    print("\n".join(lines))
    if len(there) == len(CLAIMS):
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text("\n".join([before + BEGIN, *lines, END + after]), encoding="utf-8")
        draw(there)


def train(claim: Claim, seed: int) -> str:
    """One run by its config, but for the seed and the folder; what came out."""
    target = folder(claim, seed)
    command = [sys.executable, "-m", "rlflow.cli", "fit", "--config", f"configs/{claim.config}.yaml"]
    command += ["--seed", str(seed), "--trainer.run_dir", str(target)]
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{seed}.log").open("w") as log:
        ended = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT
        )
    if ended.returncode:
        return f"{claim.config} with seed {seed} FAILED: {log.name}"
    before, after = validated(claim, seed)
    return f"{claim.config} with seed {seed}: {claim.validated} {before:.3f} to {after:.3f}"


def table(claims: Iterable[Claim]) -> list[str]:
    """A line of the page for each claim."""
    lines = [
        "| config | steps | validation | before | after | gain | in standard errors | in training |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for claim in claims:
        starts, ends = zip(*(validated(claim, seed) for seed in SEEDS), strict=True)
        gains = [after - before for before, after in zip(starts, ends, strict=True)]
        error = standard_error(gains)
        steps = len(records(claim, SEEDS[0]))
        lines.append(
            f"| `{claim.config}` | {steps} | `{claim.validated}` | {each(starts)} | {each(ends)}"
            f" | {statistics.mean(gains):+.3f} ± {error:.3f} | {statistics.mean(gains) / error:.1f} | {moved(claim)} |"
        )
    return lines


def moved(claim: Claim) -> str:
    """How the claim's metric of training moved, over seeds."""
    if claim.trained is None:
        return ""
    if claim.beside is not None:
        other = replace(claim, config=claim.beside)
        mine, theirs = (statistics.mean(mean(each, seed) for seed in SEEDS) for each in (claim, other))
        return f"`{claim.trained}` {mine:.3f}, where `{claim.beside}` has {theirs:.3f}"
    ends = [first_and_last(claim, seed) for seed in SEEDS]
    gains = [last - first for first, last in ends]
    first, last = (statistics.mean(end) for end in zip(*ends, strict=True))
    word = "falls" if claim.falls else "rises"
    in_errors = statistics.mean(gains) / standard_error(gains) * (-1 if claim.falls else 1)
    return f"`{claim.trained}` {word} {first:.3f} to {last:.3f}, {in_errors:.1f} standard errors"


def mean(claim: Claim, seed: int) -> float:
    """The mean of the trained metric over a run's steps."""
    return statistics.mean(float(record[claim.trained]) for record in records(claim, seed) if claim.trained in record)


def first_and_last(claim: Claim, seed: int) -> tuple[float, float]:
    """Means of the trained metric over the first and the last tenth of a run's steps."""
    found = [float(record[claim.trained]) for record in records(claim, seed) if claim.trained in record]
    tenth = max(1, len(found) // 10)
    return statistics.mean(found[:tenth]), statistics.mean(found[-tenth:])


def validated(claim: Claim, seed: int) -> tuple[float, float]:
    """The first and the last validation of a run."""
    found = curve(claim, seed)
    return found[0][1], found[-1][1]


def curve(claim: Claim, seed: int) -> list[tuple[int, float]]:
    """The validations of a run by step."""
    lines = (folder(claim, seed) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    every = [json.loads(line) for line in lines]
    return [(record["step"], record[claim.validated]) for record in every if claim.validated in record]


def records(claim: Claim, seed: int) -> list[dict[str, float]]:
    """The metrics of a run's steps, without the validation before them."""
    lines = (folder(claim, seed) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["step"] > 0]


def folder(claim: Claim, seed: int) -> Path:
    """Where a run's results lie."""
    return RUNS / claim.config / str(seed)


def standard_error(gains: Sequence[float]) -> float:
    """Of the mean of `gains`."""
    return max(statistics.stdev(gains) / math.sqrt(len(gains)), 1e-12)


def each(values: Iterable[float]) -> str:
    """Seed by seed."""
    return ", ".join(f"{value:.3f}" for value in values)


def draw(claims: Sequence[Claim]) -> None:
    """A panel for each claim: the validation of each seed by step."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    columns = 5
    rows = -(-len(claims) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(3 * columns, 2.2 * rows), layout="constrained")
    for panel in axes.flat[len(claims) :]:
        panel.axis("off")
    for claim, panel in zip(claims, axes.flat, strict=False):
        for seed in SEEDS:
            panel.plot(*zip(*curve(claim, seed), strict=True), linewidth=1.2)
        panel.set_title(claim.config, fontsize=9)
        panel.set_ylabel(claim.validated, fontsize=7)
        panel.tick_params(labelsize=7)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
