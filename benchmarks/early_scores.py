"""Rewards that score responses as they end: time that a slow reward adds to a step, with vLLM and transformers.

    python benchmarks/early_scores.py

GRPO with a small random model in one process; nothing is learned, so that responses are of the same lengths all along.
A reward in processes of its own (`timeout_s`, 8 `workers`) sleeps for 50 ms a sample. Steps of one run take turns:
`free` does not sleep, `early` scores each response when it has ended, `late` scores after the last has ended, as plain
functions do. Seconds are those of `rollout` and `rewards` together, medians with the smallest and largest. What a way
adds is the median of its differences from the `free` step of its round: to both nodes, and to `rewards` alone, which is
what is left when the last response has ended. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from small_run import spread

from rlflow import Callback, CausalLM, Optimizer, PromptData, Trainer
from rlflow.algorithms import GRPO
from rlflow.models.tiny import write_tiny_model
from rlflow.rewards import CallableReward
from rlflow.rollout import RolloutEngine, TransformersEngine, VLLMEngine
from rlflow.strategies import SingleProcess

WAYS = ("free", "early", "late")
PROMPTS, SAMPLES = 8, 8
LONGEST = 256
STOP = (45, 46)  # of 128 tokens: about 40 tokens to a response, and one in 60 is cut
ENGINES: dict[str, RolloutEngine] = {"vllm": VLLMEngine(kv_cache_gib=0.25), "transformers": TransformersEngine()}


def main() -> None:
    """Run each engine and print its steps and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="how often each way has a turn, after one that warms up")
    parser.add_argument("--sample", type=float, default=0.05, help="seconds that a sample takes")
    parser.add_argument("--workers", type=int, default=8, help="samples that are scored at a time")
    given = parser.parse_args()
    found = {name: measured(engine, given.rounds, given.sample, given.workers) for name, engine in ENGINES.items()}
    print(json.dumps({"benchmark": "early_scores", "rows": PROMPTS * SAMPLES, **vars(given), "engines": found}))


def measured(engine: RolloutEngine, rounds: int, sample_s: float, workers: int) -> dict[str, Any]:
    """Seconds of each way's steps, and what `early` and `late` add to `free`; printed."""
    turns = Turns()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", hidden_size=128, layers=2, max_position=512)
        reward = CallableReward("simulated_delays.scored_after", timeout_s=60, workers=workers)
        actor = CausalLM(str(model), optimizer=Optimizer("sgd", lr=0.0))
        module = GRPO(actor, reward, SAMPLES, LONGEST, stop_token_ids=STOP)
        steps = len(WAYS) * (rounds + 1)
        rows = [
            {"prompt": f"{i % 10}+{i * 7 % 10}=", "delay_s": sample_s * (way != "free")}
            for step in range(steps)
            for way in [WAYS[step % len(WAYS)]]
            for i in range(PROMPTS)
        ]
        data = PromptData(rows, prompts_per_step=PROMPTS, prompt="prompt", shuffle=False)
        trainer = Trainer(
            f"{folder}/run",
            max_steps=steps,
            devices=1,
            accelerator="cpu",
            strategy=SingleProcess(),
            rollout=engine,
            callbacks=[turns],
        )
        trainer.fit(module, data)
    both, after = (by_way([of[part] for of in turns.seconds]) for part in ("both", "rewards"))
    name, alone = type(engine).__name__, PROMPTS * SAMPLES * sample_s / workers
    for way, times in both.items():
        print(f"{name}, {way}: {spread(times)}; adds {added(both, way):.3f} s, to `rewards` {added(after, way):.3f} s")
    print(f"{name}: {PROMPTS * SAMPLES} samples of {sample_s:g} s on {workers} workers alone take {alone:.2f} s")
    return {
        "seconds": {way: statistics.median(of) for way, of in both.items()},
        "added": {way: added(both, way) for way in WAYS[1:]},
        "added_to_rewards": {way: added(after, way) for way in WAYS[1:]},
        "alone": alone,
    }


def by_way(steps: list[float]) -> dict[str, list[float]]:
    """The numbers of each way's steps, without those that warm up."""
    return {way: steps[len(WAYS) + place :: len(WAYS)] for place, way in enumerate(WAYS)}


def added(seconds: Mapping[str, list[float]], way: str) -> float:
    """The median of what a way takes more than `free` in the same round."""
    return statistics.median(slow - free for slow, free in zip(seconds[way], seconds["free"], strict=True))


class Turns(Callback):
    """Gives each way its steps, and notes how long these generated and scored."""

    def __init__(self) -> None:
        self.seconds: list[dict[str, float]] = []
        self._scored_as_made: frozenset[str] = frozenset()

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        self._scored_as_made = module._context.scored_as_made

    def on_task_start(self, trainer: Trainer, module: Any, task: str, step: int) -> None:
        early = WAYS[(step - 1) % len(WAYS)] != "late"
        module._context.scored_as_made = self._scored_as_made if early else frozenset()

    def on_step_end(self, trainer: Trainer, module: Any, step: int, metrics: Mapping[str, float]) -> None:
        rewards = metrics["time/rewards"]
        self.seconds.append({"rewards": rewards, "both": metrics["time/rollout"] + rewards})


if __name__ == "__main__":
    main()
