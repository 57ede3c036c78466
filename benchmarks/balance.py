"""The gain of evening out tokens between ranks: a step of two ranks, and the spread of load over up to 1,024.

    python benchmarks/balance.py

The step: GRPO on two gloo ranks of one thread, 64 responses of random tokens whose lengths are log-normal (mean 128,
sigma 1, at most 1,024) and cost nothing to make. `balance: auto` and `off` take turns with the same responses, and are
compared step by step, in two ways. *Emulated*: training **sleeps** 0.5 ms a token and trains a very small model; the
time of the step is printed. *Computed*: a Qwen2 of 0.4 million random weights is trained without a sleep; it is printed
how long the busier rank is on a core, whoever else uses it. On cores that ranks share, the time of such a step shows
nothing: an idle rank gives its core to the busy one. What could be gained at most is the tokens of the fuller rank over
the mean, where rows stay.

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
from pathlib import Path
from typing import Any

import torch
from small_run import (
    EmulatedGRPO,
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

from rlflow import CausalLM, PerSample, PerToken
from rlflow.databuffer.balance import deal, group_partition, grouped
from rlflow.models.tiny import write_tiny_model
from rlflow.types import WithTexts

MEAN, LONGEST = 128, 1024
TRAIN_S = 0.5e-3  # for each token
ROWS, GROUP = 64, 8  # of a rank in the simulation
SIGMAS = (0.5, 1.0, 1.5)


def main() -> None:
    """Measure the step, simulate the loads, and print both and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="of a run, after those that warm up")
    parser.add_argument("--rounds", type=int, default=2, help="how often both runs are made")
    parser.add_argument("--draws", type=int, default=5, help="of the simulation")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder) / "emulated", hidden_size=32, intermediate_size=64, layers=1)
        write_tiny_model(Path(folder) / "computed")
        found: list[list[dict[tuple[str, str], Trained]]] = on_ranks(2, rounds, Path(folder), given.steps, given.rounds)
    runs = {key: [[rank[number][key] for rank in found] for number in range(given.rounds)] for key in found[0][0]}
    measures = {"emulated": step_seconds, "computed": busiest_cpu_seconds}
    seconds = {key: [s for ranks in runs[key] for s in measures[key[0]](ranks)] for key in runs}
    ratios = {
        work: statistics.median(
            off / auto for off, auto in zip(seconds[work, "off"], seconds[work, "auto"], strict=True)
        )
        for work in measures
    }
    steps = [step for ranks in runs["emulated", "off"] for step in ranks[0].metrics]
    possible = statistics.median(step["load/most_over_mean"] for step in steps)
    for key, times in seconds.items():
        print(f"{' '.join(key)}: {spread(times)}")
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
                "seconds": {" ".join(key): statistics.median(times) for key, times in seconds.items()},
                "simulated_max_over_mean": simulated,
            }
        )
    )


MODES = ("auto", "off")


def rounds(folder: Path, steps: int, count: int) -> list[dict[tuple[str, str], Trained]]:
    """All runs, `count` times, on this rank: by how training is done, and by mode."""
    runs = [(work, mode) for work in ("emulated", "computed") for mode in MODES]
    return [{(work, mode): run(folder, steps, work, mode) for work, mode in runs} for _ in range(count)]


def run(folder: Path, steps: int, work: str, mode: Any) -> Trained:
    module = CountingGRPO(CausalLM(str(folder / work)), OddCharacters(), group_size=GROUP, max_response_length=LONGEST)
    module.train_s = TRAIN_S if work == "emulated" else 0.0
    engine = ScriptedEngine(MEAN, sigma=1.0)
    return train(module, prompts(folder, 256, 8), steps, engine=engine, balance=mode, logprob_gap_limit=1e9)


class CountingGRPO(EmulatedGRPO):
    """Logs the tokens of the fullest rank over the mean, where rows were made."""

    def rewards(
        self, rollout: WithTexts, model_scores: PerSample | None = None, kl_penalty: PerToken | None = None
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
        balanced = grouped(deal(tokens, ranks), ranks)
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
