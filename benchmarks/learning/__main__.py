"""Does every algorithm learn, and would a fault be noticed? Trains, checks gates, and writes tables and curves.

    make learn                                            # all: hours on 2 cores; what is finished is not run again
    python -m benchmarks.learning --only learn/ppo --jobs 2
    python -m benchmarks.learning --table                 # run nothing, sum up what is there

Names are folders under `runs`: `learn/` holds chains of 64 digits, with TRL's and those with a planted fault,
`learning/` sums of three digits by each algorithm's own config, and `agents/` conversations with environments. A part
of a name will do. The exit code is 0 if every chosen training is there and passed. The tables of `docs/learning.md`,
`docs/agents.md` and `docs/maintainers/learning_faults.md`, and their pictures, are written from what is there.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.learning import agents, learning_curves, sums, table
from benchmarks.learning.agents import AGENTS
from benchmarks.learning.gates import ACCURACY
from benchmarks.learning.running import run_all
from benchmarks.learning.runs import ROOT, Task
from benchmarks.learning.trainings import BESIDE, FAULTY, GATES, MOST_APART, OURS, THEIRS

DOCS = ROOT / "docs"
PAGE, OF_AGENTS, PICTURES = DOCS / "learning.md", DOCS / "agents.md", DOCS / "pictures"
OF_FAULTS = DOCS / "maintainers" / "learning_faults.md"


def main() -> int:
    """Run, check and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--table", action="store_true", help="run nothing")
    given = parser.parse_args()
    everything = [*GATES, THEIRS, *FAULTY, *AGENTS, *(claim.task for claim in sums.CLAIMS)]
    chosen = [task for task in everything if any(part in task.name for part in given.only)]
    problems = [] if given.table else run_all(chosen, given.jobs)
    for task in filter(Task.of_other_code, everything):
        print(f"{task.name}: of other code than this; remove {task.marked(0).parent}/*.finished to train it again")
    problems += [f"{task.name} is not finished" for task in chosen if not task.complete()]
    problems += [problem for task in chosen if task.complete() for problem in failures(task)]
    write()
    print("\n".join(problems) or f"{len(chosen)} trainings passed")
    return 1 if problems else 0


def failures(task: Task) -> list[str]:
    """Gates that a finished training did not pass."""
    runs = table.runs_of(task)
    if task in GATES:
        failed = table.failed_gates(GATES[task], runs)
        return [] if failed == "none" else [f"{task.name} failed: {failed}"]
    if task in AGENTS:
        return agents.failed(task)
    if task in FAULTY:
        passed = table.failed_gates(FAULTY[task], runs) == "none"
        return [f"{task.name} passed, with a fault in it"] if passed else []
    if task == THEIRS:
        both = table.runs_of(OURS) if OURS.complete() else []
        same = both and table.agree(both, runs, ACCURACY, MOST_APART)
        return [] if same else [f"{task.name} ended elsewhere than {OURS.name}"]
    (claim,) = (claim for claim in sums.CLAIMS if claim.task == task)
    return [] if sums.learns(claim) else [f"{task.name} did not rise by two standard errors"]


def write() -> None:
    """Write the tables of the trainings that are there, and each picture whose trainings all are."""
    table.write(PAGE, "chains", table.of_gates(GATES))
    table.write(OF_FAULTS, "faults in training", table.of_gates(FAULTY))
    if all(task.complete() for task in GATES):
        panels = {table.called(task): (ACCURACY, table.runs_of(task)) for task in GATES}
        learning_curves.draw_panels(PICTURES / "learning_chains.svg", panels)
    if OURS.complete() and THEIRS.complete():
        both = {"rlflow": table.runs_of(OURS), "TRL": table.runs_of(THEIRS)}
        table.write(PAGE, "trl", table.of_both(*both.values(), BESIDE))
        learning_curves.draw_beside(PICTURES / "learning_trl.svg", both, BESIDE[1:4])
    table.write(PAGE, "sums", sums.table(sums.CLAIMS))
    table.write(OF_AGENTS, "agents", agents.table())
    if all(task.complete() for task in AGENTS):
        learning_curves.draw_panels(PICTURES / "agents.svg", agents.panels(), columns=2)
    if all(claim.task.complete() for claim in sums.CLAIMS):
        panels = {claim.config: (claim.validated, claim.runs) for claim in sums.CLAIMS}
        learning_curves.draw_panels(PICTURES / "learning.svg", panels, columns=5)


if __name__ == "__main__":
    sys.exit(main())
