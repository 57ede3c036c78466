"""What evening out tokens between ranks is worth: a step of two ranks, and the spread of load over up to 1,024.

    python benchmarks/balance.py

The step: GRPO on two gloo ranks of one thread, a Qwen2 of 0.4 million random weights that is really trained, 64
responses of random tokens whose lengths are log-normal (mean 128, sigma 1, at most 1,024) and cost nothing to make.
`balance: auto` and `off` take turns with the same responses, and are compared step by step: how long training takes,
and the seconds that the busier rank is on a core for the whole step, which do not depend on who else uses the machine.
What could be gained at most is the tokens of the fuller rank over the mean, where rows stay.

The simulation deals rows and starts no process: log-normal lengths, 64 rows a rank in whole groups of 8 for 8 to 1,024
ranks; the tokens of the fullest rank over the mean, which is how much longer a step takes than it must; medians of
several draws. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from small_run import (
    OddCharacters,
    ScriptedEngine,
    Trained,
    busiest_cpu_seconds,
    on_ranks,
    prompts,
    spread,
    step_seconds,
    train,
)
from torch import Tensor

from rlflow import PerSample, PerToken, Rollout
from rlflow.algorithms import GRPO
from rlflow.data.balance import balanced_partition, group_partition
from rlflow.models.tiny import write_tiny_model

MEAN, LONGEST = 128, 1024
ROWS, GROUP = 64, 8  # of a rank in the simulation
SIGMAS = (0.5, 1.0, 1.5)


def main() -> None:
    """Measure the step, simulate the loads, and print both and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="of a run, after those that warm up")
    parser.add_argument("--rounds", type=int, default=2, help="how often both runs are made")
    parser.add_argument("--draws", type=int, default=5, help="of the simulation")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder) / "model")
        found: list[list[dict[str, Trained]]] = on_ranks(2, rounds, Path(folder), given.steps, given.rounds)
    runs = {mode: [[rank[number][mode] for rank in found] for number in range(given.rounds)] for mode in MODES}
    measures: dict[str, Callable[[list[Trained]], list[float]]] = {
        "step": step_seconds,
        "training": lambda ranks: [step["time/actor_loss"] for step in ranks[0].metrics],
        "cpu": busiest_cpu_seconds,
    }
    seconds = {
        name: {mode: [s for ranks in runs[mode] for s in measure(ranks)] for mode in MODES}
        for name, measure in measures.items()
    }
    for mode in MODES:
        print(f"{mode}: " + ", ".join(f"{name} {spread(times[mode])}" for name, times in seconds.items()))
    ratios = {
        name: statistics.median(off / auto for off, auto in zip(times["off"], times["auto"], strict=True))
        for name, times in seconds.items()
    }
    possible = statistics.median(step["load/most_over_mean"] for ranks in runs["off"] for step in ranks[0].metrics)
    print(f"off over auto, median of steps: {ratios}; tokens allow {possible:.2f}")
    simulated = [simulate(ranks, sigma, given.draws) for sigma in SIGMAS for ranks in (8, 32, 128, 512, 1024)]
    for row in simulated:
        print(
            f"{row['ranks']:5} ranks, sigma {row['sigma']}: fullest over mean {row['off']:.2f} where rows stay,"
            f" {row['auto']:.4f} balanced, dealt in {row['seconds']:.2f} s"
        )
    print(
        json.dumps(
            {
                "benchmark": "balance",
                "ratio_off_to_auto": ratios,
                "ratio_possible": possible,
                "seconds": {
                    name: {mode: statistics.median(times[mode]) for mode in MODES} for name, times in seconds.items()
                },
                "simulated_max_over_mean": simulated,
            }
        )
    )


MODES = ("auto", "off")


def rounds(folder: Path, steps: int, count: int) -> list[dict[str, Trained]]:
    """Both modes, `count` times, on this rank."""
    return [{mode: run(folder, steps, mode) for mode in MODES} for _ in range(count)]


def run(folder: Path, steps: int, mode: Any) -> Trained:
    module = CountingGRPO(str(folder / "model"), OddCharacters(), group_size=GROUP, max_response_length=LONGEST)
    engine = ScriptedEngine(MEAN, sigma=1.0)
    return train(module, prompts(folder, 256, 8), steps, engine=engine, balance=mode, logprob_gap_limit=1e9)


class CountingGRPO(GRPO):
    """Logs the tokens of the fullest rank over the mean, where rows were made."""

    def rewards(
        self, rollout: Rollout, model_scores: PerSample | None = None, kl_penalty: PerToken | None = None
    ) -> PerSample:
        mine = rollout.lengths.sum().double()[None]
        of_ranks = self.all_rows(mine.expand(len(rollout.lengths)).contiguous())
        self.log("load/most_over_mean", (of_ranks.max() / of_ranks.unique().mean())[None])
        return super().rewards(rollout, model_scores, kl_penalty)


def simulate(ranks: int, sigma: float, draws: int) -> dict[str, float]:
    """The fullest rank's tokens over the mean, where rows stay in whole groups and where they are balanced."""
    stay, even, seconds = [], [], []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(draw)
        normal = torch.randn(ranks * ROWS, generator=generator)
        tokens = (normal * sigma).exp_().mul_(1000).long().clamp_(1, 64_000)
        ids = torch.arange(len(tokens))
        stay.append(fullest(tokens, group_partition(ids // GROUP, ranks)))
        began = time.perf_counter()
        balanced = balanced_partition(tokens, ids, ranks)
        seconds.append(time.perf_counter() - began)
        even.append(fullest(tokens, balanced))
    return {
        "ranks": ranks,
        "sigma": sigma,
        "off": statistics.median(stay),
        "auto": statistics.median(even),
        "seconds": statistics.median(seconds),
    }


def fullest(tokens: Tensor, shares: tuple[Tensor, ...]) -> float:
    loads = torch.stack([tokens[rows].sum() for rows in shares]).double()
    return float(loads.max() / loads.mean())


if __name__ == "__main__":
    main()
