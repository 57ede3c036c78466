"""A step of rlflow against TRL's, and against vLLM and DeepSpeed with nothing around them, on two CPU cores.

    python -m benchmarks.step                     W1, then W2, W3 and W4
    python -m benchmarks.step W2 --without-trl

Workloads, see `workloads.py`; all on two ranks of one thread:

- W1: GRPO, float32, 3.2 million weights, prompts `a+b=`, 256 responses of at most 256 tokens, one update.
- W2: GRPO with KL to a reference, bf16, 20 million weights, prompts of 64 to 256 tokens, 64 responses of at most 192.
- W3: PPO with a critic, four updates a step, the model of W1, 128 responses of at most 512 tokens.
- W4: W2 without the reference, training adapters of rank 16.

The sides, one after another in each round, in processes of their own:

- rlflow: `Trainer.fit` with ZeRO-2 and one vLLM engine on each rank, again with `TransformersEngine`, and with a vLLM
  that compiles its model (`enforce_eager: false`). A step lasts from the end of one to the end of the next, logging and
  weight sync included.
- The parts, on both ranks at once and after each of rlflow's steps, so that they meet the same machine: vLLM's
  `generate` alone with the same requests and weights, then every forward, backward and optimizer pass of that step in
  the fastest of three ways (`forward_backward.py`). Each counts with its slower rank.
- TRL's `GRPOTrainer` with micro-batches of 8, 16, 32 and all rows, where it has the algorithm (`trl_side.py`).

What a part reaches of the rate of matrix products that was measured with it: the operations of products that it
needs, padding not counted, over its seconds (`gemm.py`).

Results are kept in a file as they come, so a run that was cut short goes on where it was; `--again` begins anew.
TRL is part of the environment that `make setup` makes, not of rlflow's own needs. Each workload ends with a line of
JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.step.summary import Seconds, summary
from benchmarks.step.trl_side import micro_batches
from benchmarks.step.workloads import RANKS, WORKLOADS, Workload

RESULTS = Path("runs/benchmark_step.jsonl")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> None:
    """Run each workload's sides, and print their steps, ratios, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="W1 W2 W3 W4", help="which; all where none is named")
    parser.add_argument("--without-trl", action="store_true", help="leave TRL out, and the ratios to it")
    parser.add_argument("--sides", nargs="+", help="no others: vllm, compiled, transformers, trl_8 and so on")
    parser.add_argument("--rounds", type=int, default=1, help="how often all sides run")
    parser.add_argument("--steps", type=int, default=3, help="of rlflow in a round, after one to warm up")
    parser.add_argument("--trl-steps", type=int, default=1, help="of TRL and each size, after one to warm up")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file that keeps what was measured")
    parser.add_argument("--again", action="store_true", help="measure what is in the file once more")
    parser.add_argument("--side", help=argparse.SUPPRESS)  # what a process of its own runs
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.workloads) - WORKLOADS.keys():
        parser.error(f"there is no workload {min(unknown)}; there are {', '.join(WORKLOADS)}")
    chosen = [WORKLOADS[name] for name in given.workloads or WORKLOADS]
    if given.side is not None:
        run_side(chosen[0], given)
        return
    if not given.without_trl and importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed: run this with the environment of `make setup`, or give --without-trl")
    if given.again:
        given.results.unlink(missing_ok=True)
    for workload in chosen:
        compare(workload, given)


def run_side(workload: Workload, given: argparse.Namespace) -> None:
    """Run a side in a process of its own."""
    kind, _, micro_batch = given.side.partition("_")
    if kind == "trl":
        from benchmarks.step.trl_side import run_trl

        run_trl(workload, given.folder, given.trl_steps, int(micro_batch))
    else:
        from benchmarks.step.rlflow_side import run_rlflow

        run_rlflow(workload, given.folder, kind, given.steps)


def compare(workload: Workload, given: argparse.Namespace) -> None:
    """All sides of a workload, then what they say."""
    trl = [] if given.without_trl or not workload.trl else [f"trl_{size}" for size in micro_batches(workload)]
    found: dict[str, list[float]] = {}
    sides = ["vllm", *trl, "transformers", "compiled"]
    for number in range(given.rounds):
        for side in [side for side in sides if given.sides is None or side in given.sides]:
            for name, values in measured(workload, side, number, given).items():
                found.setdefault(name, []).extend(values)
    print_table(workload, found)
    if "rlflow_vllm" in found:
        print(json.dumps(summary(workload.name, found)), flush=True)


def print_table(workload: Workload, found: Seconds) -> None:
    """A line for each name."""
    for name, values in sorted(found.items()):
        middle, least, most = statistics.median(values), min(values), max(values)
        print(f"{workload.name} {name}: median {middle:.4g} ({least:.4g} to {most:.4g}, n={len(values)})")


def measured(workload: Workload, side: str, number: int, given: argparse.Namespace) -> Seconds:
    """Measurements of a side by name, for each step; read from a file if they were made before."""
    key = {"workload": workload.name, "side": side, "round": number}
    if given.results.is_file():
        for line in given.results.read_text().splitlines():
            kept = json.loads(line)
            if kept["key"] == key:
                return dict(kept["found"])
    found = in_processes_of_its_own(workload, side, given)
    given.results.parent.mkdir(parents=True, exist_ok=True)
    with given.results.open("a") as file:
        file.write(json.dumps({"key": key, "found": found}) + "\n")
    for name, values in found.items():
        print(
            f"{workload.name} round {number + 1}, {name}: {', '.join(f'{value:.4g}' for value in values)}", flush=True
        )
    return found


def in_processes_of_its_own(workload: Workload, side: str, given: argparse.Namespace) -> Seconds:
    """The results that the side leaves in `found.json`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        workload.write(folder, 1 + max(given.steps, given.trl_steps))
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command = [sys.executable, *(torchrun if side.startswith("trl") else []), "-m", "benchmarks.step"]
        command += [workload.name, "--side", side, "--folder", scratch]
        command += ["--steps", str(given.steps), "--trl-steps", str(given.trl_steps)]
        environment = os.environ | ENVIRONMENT
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        if done.returncode:
            sys.exit(f"{done.stdout}\n{side} ended with code {done.returncode}")
        found: Seconds = json.loads((folder / "found.json").read_text())
        return found


if __name__ == "__main__":
    main()
