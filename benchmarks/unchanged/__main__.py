"""Did a change of the code change a number? Trains every config before and after, and compares all bits.

    python -m benchmarks.unchanged --base v0.1 --jobs 2     # resumable: what is finished is not run again
    python -m benchmarks.unchanged --base v0.1 --only ppo grpo_lora-2
    python -m benchmarks.unchanged --base v0.1 --table      # run nothing, compare what is there

Each config of the base makes three steps through the command line of the base and of the working tree, at 1 and at 2
ranks or at those of its placement, from models that the base made. Compared are every metric of each step but times
and bytes, the samples, and each tensor of each trained model; names that changed are in `renamed.py`. The exit code
is 0 if all runs are there and equal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.unchanged import starts
from benchmarks.unchanged.cases import apart, cases_of
from benchmarks.unchanged.comparison import LEFT_OUT
from benchmarks.unchanged.renamed import CONFIG, DEFAULTS, renamed, unused
from benchmarks.unchanged.revisions import ROOT, committed, present
from benchmarks.unchanged.running import Runs, run_all
from benchmarks.unchanged.table import row, summary, table


def main() -> int:
    """Run and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="the revision before, as git takes it")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names such as ppo-2, learn-ppo or vllm")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--base-alone", action="store_true", help="run the base and nothing else")
    parser.add_argument("--allow", nargs="*", default=[], metavar="NAME", help="values that one side may lack")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "unchanged", help="where records are kept")
    given = parser.parse_args()
    folder = given.runs.resolve()
    base, now = committed(given.base, folder), present(folder)
    chosen = [case for case in cases_of(base.code / "configs") if any(part in case.name for part in given.only)]
    if given.table and not starts.complete(base):
        print(f"nothing of {base.name} is in {folder}")
        return 1
    models = starts.of(base) if given.table else starts.made(base, given.jobs)
    before, after = Runs(base, models), Runs(now, models, CONFIG, DEFAULTS)
    sides = [] if given.table else [before] if given.base_alone else [before, after]
    problems = [line for side in sides for line in run_all(side, chosen, given.jobs)]
    if given.base_alone:
        done = sum(before.record(case) is not None for case in chosen)
        print("\n".join([*problems, f"{done} of {len(chosen)} runs of {base.name} are recorded"]))
        return 0 if chosen and done == len(chosen) else 1
    found = [(case, before.values(case), after.values(case)) for case in chosen]
    rows = [row(case, then and renamed(then), today, given.allow) for case, then, today in found]
    unseen = unused([then or {} for _, then, _ in found], [today or {} for *_, today in found])
    print("\n".join(table(rows)), "\n")
    for why, names in apart(base.code / "configs").items():
        print(f"{', '.join(names)}: {why}")
    print(f"Left out: {', '.join(LEFT_OUT)}. {base.name}: {base.folder.name}, {now.name}: {now.folder.name}.")
    if given.only == [""]:  # all runs together show every name
        problems += [f"{line}: a renaming in `renamed.METRICS` that no run shows" for line in unseen]
    print("\n".join([*problems, summary(rows)]))
    return 0 if rows and not problems and all(each.equal for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
