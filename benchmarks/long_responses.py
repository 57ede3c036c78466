"""One response of 8,192 tokens on each of two ranks: through vLLM, exchange and training, sequences whole or divided.

    python benchmarks/long_responses.py [--tokens 8192]

REINFORCE++ with a Qwen2 of two layers (0.4 million random weights, a context as long as it takes) on two gloo ranks of
one thread: two prompts, one response to each, which no token ends. One step is made with the actor's
`sequence_parallel_size` 1, where each rank trains on the whole of one response, and one with 2, where both train on one
half of each; each in fresh processes. Memory is that of the slot of a rank that needs most: resident in all, and what a
phase adds at its peak to what was there when it began; the processes hold torch, DeepSpeed and vLLM with a cache of
0.25 GiB in addition. `held` is what the databuffer holds of values and messages. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from small_run import OddCharacters, on_ranks, prompts

from rlflow import Callback, CausalLM, Optimizer, Trainer
from rlflow.algorithms import REINFORCEPlusPlus
from rlflow.models.tiny import write_tiny_model
from rlflow.rollout import Completion, Sampling, VLLMEngine
from rlflow.settings import Place
from rlflow.strategies import DeepSpeedStrategy

MIB = 2**20
SIZES = (1, 2)


def main() -> None:
    """Run both sizes in fresh processes and print what each takes, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of each response")
    given = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            write_tiny_model(Path(folder) / "model", max_position=given.tokens + 64)
            ranks = on_ranks(2, run, Path(folder), size, given.tokens)
        found[str(size)] = summary(ranks)
        print(f"sequence parallel {size}: {json.dumps(found[str(size)])}", flush=True)
    one, two = (found[str(size)] for size in SIZES)
    for name in ("actor/loss", "actor/grad_norm"):
        assert abs(one["metrics"][name] - two["metrics"][name]) < 1e-4, (name, one, two)
    ratio = one["train_added_mib"] / two["train_added_mib"]
    print(json.dumps({"benchmark": "long_responses", "tokens": given.tokens, "train_memory_ratio": ratio, **found}))


def run(folder: Path, size: int, tokens: int) -> tuple[dict[str, float], dict[str, Any]]:
    """One step on this rank: its metrics, and the memory of each task."""
    module = REINFORCEPlusPlus(
        CausalLM(str(folder / "model"), optimizer=Optimizer("sgd", lr=1e-3)),
        OddCharacters(),
        max_response_length=tokens,
    )
    memory = Memory()
    trainer = Trainer(
        str(folder / "run"),
        max_steps=1,
        devices=2,
        accelerator="cpu",
        placement={"actor": Place(sequence_parallel_size=size)},
        strategy=DeepSpeedStrategy(stage=2, token_budget=tokens + 64),
        rollout=EndlessVLLM(kv_cache_gib=0.25),
        callbacks=[memory],
    )
    trainer.fit(module, prompts(folder, 2, 2))
    return memory.metrics, memory.of_tasks


class EndlessVLLM(VLLMEngine):
    """Ends no response before its longest."""

    def _generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> list[Completion]:
        return super()._generate(prompts, seeds, replace(sampling, stop_token_ids=()))


class Memory(Callback):
    """Resident bytes when each task began, and the most of them until the next."""

    def __init__(self) -> None:
        self.of_tasks: dict[str, tuple[int, int]] = {}
        self.metrics: dict[str, float] = {}
        self._task, self._began = "", 0

    def on_task_start(self, trainer: Any, module: Any, task: str, step: int) -> None:
        if self._task:
            self.of_tasks[self._task] = self._began, resident("VmHWM")
        self._task = re.sub(r"\s+", " ", task.split(":")[0])
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        self._began = resident("VmRSS")

    def on_step_end(self, trainer: Trainer, module: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics = dict(metrics)


def resident(kind: str) -> int:
    """Bytes of this process in memory: `VmRSS` now, `VmHWM` at the peak."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, kind
    return 1024 * int(found[1])


def summary(ranks: Sequence[tuple[dict[str, float], dict[str, Any]]]) -> dict[str, Any]:
    """The summary of the rank that needs more, of both."""
    metrics = ranks[0][0]
    tasks = {name: [memory[name] for _, memory in ranks] for name in ranks[0][1]}
    added = {name: max(peak - began for began, peak in of_ranks) / MIB for name, of_ranks in tasks.items()}
    return {
        "length": metrics["rollout/length"],
        "generate_s": metrics["time/rollout"],
        "train_s": metrics["time/actor_loss"],
        "peak_mib": {name: round(max(peak for _, peak in of_ranks) / MIB) for name, of_ranks in tasks.items()},
        "generate_added_mib": added["run rollout"],
        "exchange_added_mib": sum(value for name, value in added.items() if name.startswith("exchange")),
        "train_added_mib": added["train actor_loss"],
        "held_bytes_max": metrics["exchange/held_bytes_max"],
        "metrics": {name: metrics[name] for name in ("actor/loss", "actor/grad_norm", "sync/logprob_gap")},
    }


if __name__ == "__main__":
    main()
