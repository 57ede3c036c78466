"""One step off: generation and training on ranks of their own, in turns and overlapping, against ranks that do both.

    python benchmarks/overlap.py

GRPO on two gloo ranks. **Computation is emulated by sleeps**: 2 ms a token to generate, 2 ms a token to train, so that
both take about the same and neither takes a core from the other; a small model is really trained, too. Lengths are
log-normal (sigma 0.5). The ways, with the same prompts: both ranks generate and train (colocated); rank 0 generates
and rank 1 trains, one after the other (`max_staleness` 0); the same with generation one step ahead (`max_staleness` 1).
Next to them stands the time of sleeps alone, rows divided evenly: half of both, the sum of both, and the longer of
both. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from small_run import (
    EmulatedGRPO,
    OddCharacters,
    ScriptedEngine,
    Trained,
    on_ranks,
    prompts,
    spread,
    step_seconds,
    train,
)

from rlflow import CausalLM
from rlflow.models.tiny import write_tiny_model

SECONDS_PER_TOKEN = 2e-3
APART = {"rollout": [0], "actor": [1]}
WAYS: dict[str, dict[str, Any]] = {
    "colocated": {},
    "apart": {"placement": APART},
    "one_step_off": {"placement": APART, "max_staleness": 1},
}


def main() -> None:
    """Run the ways in turns and print their steps and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="of a run, after those that warm up")
    parser.add_argument("--rounds", type=int, default=2, help="how often all ways run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder) / "model", hidden_size=32, intermediate_size=64, layers=1)
        found: list[list[dict[str, Trained]]] = on_ranks(2, rounds, Path(folder), given.steps, given.rounds)
    seconds = {
        way: [s for number in range(given.rounds) for s in step_seconds([rank[number][way] for rank in found])]
        for way in WAYS
    }
    metrics = found[0][0]["apart"].metrics
    alone = statistics.median(step["rollout/tokens"] for step in metrics) * SECONDS_PER_TOKEN
    limit = {"colocated": alone, "apart": 2 * alone, "one_step_off": alone}
    median = {way: statistics.median(times) for way, times in seconds.items()}
    for way, times in seconds.items():
        print(
            f"{way}: {spread(times)} a step, {median[way] / median['colocated']:.2f} of colocated;"
            f" sleeps alone {limit[way]:.2f} s"
        )
    staleness = [step["rollout/staleness"] for step in found[0][0]["one_step_off"].metrics]
    print(
        json.dumps(
            {
                "benchmark": "overlap",
                "step_seconds": median,
                "sleep_seconds": limit,
                "ratio_apart_to_one_step_off": median["apart"] / median["one_step_off"],
                "ratio_to_colocated": {way: median[way] / median["colocated"] for way in WAYS},
                "staleness_mean": statistics.mean(staleness),
            }
        )
    )


def rounds(folder: Path, steps: int, count: int) -> list[dict[str, Trained]]:
    """All ways, `count` times, on this rank."""
    return [{way: run(folder, steps, settings) for way, settings in WAYS.items()} for _ in range(count)]


def run(folder: Path, steps: int, settings: dict[str, Any]) -> Trained:
    module = EmulatedGRPO(CausalLM(str(folder / "model")), OddCharacters(), group_size=4, max_response_length=128)
    module.train_s = SECONDS_PER_TOKEN
    engine = ScriptedEngine(32, sigma=0.5, seconds_per_token=SECONDS_PER_TOKEN)
    return train(module, prompts(folder, 256, 6), steps, engine=engine, logprob_gap_limit=1e9, **settings)


if __name__ == "__main__":
    main()
