"""Time of an update in which rows share prefixes, over the time for the same rows read whole.

    python -m benchmarks.prefixes [--only "1,000 + 100"] [--repeats 5]

One rank of one thread, random weights and rows; an update is a forward and a backward pass over all micro-batches.
Times are of the processor, medians of the repeats after one to warm up, the two ways in turn. Memory is what the first
update adds to the peak of a process of its own. Linux only. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.step.workloads import LARGER, SMALL, Sizes
from rlflow.models.causal_lm import CausalLM
from rlflow.models.handle import ForwardPlan
from rlflow.models.packing import take
from rlflow.models.tiny import write_tiny_model
from rlflow.values.batch import TokenRows
from rlflow.values.ragged import Ragged

VOCABULARY = 128


@dataclass(frozen=True)
class Case:
    """Rows of one update.

    Attributes:
        prompts: Number of prompts.
        prompt: Tokens of each.
        samples: Responses to each.
        response: Tokens of each response, from the fewest to the most.
        sizes: Sizes of the model.
        dtype: Dtype of its weights.
        budget: Tokens of a micro-batch.
    """

    prompts: int
    prompt: int
    samples: int
    response: tuple[int, int]
    sizes: Sizes = SMALL
    dtype: torch.dtype = torch.float32
    budget: int = 4096

    def rows(self) -> TokenRows:
        """Random rows of these lengths."""
        generator = torch.Generator().manual_seed(0)

        def draw(count: int) -> list[int]:
            return torch.randint(2, VOCABULARY, (count,), generator=generator).tolist()

        pairs = []
        for _ in range(self.prompts):
            prompt = draw(self.prompt)
            for _ in range(self.samples):
                length = int(torch.randint(self.response[0], self.response[1] + 1, (1,), generator=generator))
                pairs.append((prompt, draw(length)))
        return TokenRows.padded(*(Ragged.from_lists(list(lists)) for lists in zip(*pairs, strict=True)))


CASES = {
    "5 + 10 to 200, 8 samples (W1)": Case(8, 5, 8, (10, 200)),
    "10 + 3, 8 samples, 32 prompts": Case(32, 10, 8, (3, 3)),
    "96 + 10 to 192, 8 samples, bf16 (W2)": Case(8, 96, 8, (10, 192), LARGER, torch.bfloat16),
    "1,000 + 100, 8 samples": Case(1, 1000, 8, (100, 100), budget=16_384),
    "1,000 + 100, 16 samples": Case(1, 1000, 16, (100, 100), budget=32_768),
    "1,000 + 50 to 150, 8 samples, 4 prompts": Case(4, 1000, 8, (50, 150)),
}


class Update:
    """An update of a model over a case's rows, in one of the two ways."""

    def __init__(self, case: Case, shares: bool, folder: Path) -> None:
        model = write_tiny_model(folder / f"{case.sizes.hidden_size}", **vars(case.sizes), max_position=4096)
        self.rows, self.tokens = case.rows(), 0
        self.handle = CausalLM(str(model))
        self.handle.attach(
            self.handle.load(model, case.dtype, torch.device("cpu")),
            ForwardPlan(case.budget, share_prefixes=shares),
        )

    def __call__(self) -> float:
        """Seconds of the processor that it takes."""
        start, self.tokens = time.process_time(), 0
        for part in self.handle.plan.micro_batches(self.rows):
            rows = take(self.rows, part)
            self.tokens += self.handle.plan.model_input(rows).useful_tokens
            with self.handle.training():
                self.handle.logprobs(rows).sum().backward()
        return time.process_time() - start


def resident(what: str) -> int:
    """Kilobytes of this process, of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def added_memory(name: str, shares: bool) -> int:
    """Kilobytes by which one update raises the peak of a process of its own."""
    output = subprocess.run(
        [sys.executable, "-m", "benchmarks.prefixes", "--only", name, "--memory", str(int(shares))],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return int(output.stdout.splitlines()[-1])


def measure(name: str, case: Case, repeats: int, folder: Path) -> dict[str, float | str]:
    """The two ways in turn."""
    ways = {shares: Update(case, shares, folder) for shares in (True, False)}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(repeats + 1):
        for shares, update in ways.items():
            taken = update()
            if repeat:
                seconds[shares].append(taken)
    ratios = [ours / whole for ours, whole in zip(seconds[True], seconds[False], strict=True)]
    memory = added_memory(name, True) / added_memory(name, False)
    return {
        "case": name,
        "tokens": round(ways[True].tokens / ways[False].tokens, 3),
        "time": round(median(seconds[True]) / median(seconds[False]), 3),
        "time_min": round(min(ratios), 3),
        "time_max": round(max(ratios), 3),
        "memory": round(memory, 3),
        "seconds_whole": round(median(seconds[False]), 2),
    }


def main() -> None:
    """Print a line for each case, then all of them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of the cases")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", type=int, default=-1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {name: case for name, case in CASES.items() if given.only in name}
    with tempfile.TemporaryDirectory() as scratch:
        if given.memory >= 0:
            (case,) = chosen.values()
            update = Update(case, given.memory == 1, Path(scratch))
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, proc(5)
            before = resident("VmRSS")
            update()
            print(resident("VmHWM") - before)
            return
        found = []
        for name, case in chosen.items():
            found.append(measure(name, case, given.repeats, Path(scratch)))
            print(found[-1], flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
