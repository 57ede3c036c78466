"""An agent that calls the policy by HTTP, against the same conversation with an environment; and what a call costs.

    python -m benchmarks.door
    python -m benchmarks.door --episodes 1000 --turns 8 --engine instant

Ways take turns, and their fastest are compared. `cpu_ms` is the rank's own time on the processor for each call; with
the engine `instant`, which computes nothing, that is the door, the chat template and the rows. `lost` counts calls
whose answer is in no row.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.small_run import on_ranks
from rlflow import Environment, Harness
from rlflow.context.conversations import ConversationRunner, ConverseCall
from rlflow.databuffer.transport import Transport
from rlflow.environments.bridge import message
from rlflow.environments.conversation_format import bridge_of
from rlflow.models.tiny import write_tiny_model
from rlflow.rollout import Completion, RankInfo, RolloutEngine, Sampling, SyncReport, TransformersEngine, VLLMEngine
from rlflow.values.layout import Layout
from rlflow.values.path import RowPath

CONTEXT = 2048


class Instant(RolloutEngine):
    """Says the same whatever it reads."""

    def setup(self, model_path: str, rank_info: RankInfo) -> None:
        """There is nothing to build."""

    def update_weights(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        return SyncReport(version, 0, 0, 0.0)

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling, version: int
    ) -> list[Completion]:
        limits = sampling.limits_of(len(prompts))
        return [
            Completion((65 + seed % 26,) * most, (-1.0,) * most, False)
            for seed, most in zip(seeds, limits, strict=True)
        ]

    def close(self) -> None:
        """There is nothing to free."""


def main() -> None:
    """Print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--turns", type=int, default=4, help="of each episode")
    parser.add_argument("--tokens", type=int, default=64, help="of a turn")
    parser.add_argument("--max-concurrent", type=int, default=32, help="episodes at the same time")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model")
    parser.add_argument("--layers", type=int, default=6, help="of the model")
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts")
    parser.add_argument("--engine", choices=["vllm", "transformers", "instant"], default="vllm")
    given = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        width = given["hidden"]
        model = write_tiny_model(
            Path(folder) / "model",
            hidden_size=width,
            intermediate_size=3 * width,
            layers=given["layers"],
            heads=8,
            kv_heads=4,
            max_position=CONTEXT,
        )
        (found,) = on_ranks(1, run, model, given)
    print(json.dumps({"benchmark": "door", **given, **found}))


def run(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Both ways, with one engine."""
    engines = {
        "vllm": partial(VLLMEngine, max_num_seqs=given["max_concurrent"], kv_cache_gib=0.5),
        "transformers": partial(TransformersEngine, given["max_concurrent"]),
        "instant": Instant,
    }
    engine: RolloutEngine = engines[given["engine"]]()
    engine.setup(str(folder), RankInfo(torch.float32, torch.device("cpu")))
    weights: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    runner = ConversationRunner(
        cache(partial(bridge_of, tokenizer=tokenizer)),
        lambda row: [message("user", row["question"])],
        CONTEXT,
        tokenizer.decode,
        torch.float32,
        seed=0,
        transport=Transport(),
    )
    ways = {
        "door": Harness("benchmarks.conversation_agent.talk", timeout_s=600, max_concurrent=given["max_concurrent"]),
        "converse": Environment(
            "benchmarks.conversation_agent.Talk", max_turns=given["turns"], max_turn_length=given["tokens"]
        ),
    }
    rows = [
        {"question": f"episode {place}", "turns": given["turns"], "tokens": given["tokens"]}
        for place in range(given["episodes"])
    ]
    path, calls = RowPath(torch.arange(len(rows))[:, None], ("batch",)), given["episodes"] * given["turns"]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    sampled: dict[str, int] = {}
    for number in range(given["rounds"] + 1):  # the first starts workers
        for way, environment in ways.items():
            engine.update_weights([list(weights.named_parameters())], number)
            call = ConverseCall(0, "rollout", "actor", {"actor": number}, Layout((0,), 1))
            start, start_cpu = time.perf_counter(), time.process_time()
            rollout, _, _ = runner.run({"actor": engine}, environment, rows, path, 1, Sampling(CONTEXT - 100), call)
            if number:
                seconds[way].append(time.perf_counter() - start)
                cpu[way].append(time.process_time() - start_cpu)
            sampled[way] = int(rollout.loss_mask.sum())
            if way == "door":
                lost = calls - int(rollout.turns.sum())
    runner.close()
    engine.close()
    rate = {way: sampled[way] / min(of_way) for way, of_way in seconds.items()}
    return {
        "tokens_per_s": {way: round(each, 1) for way, each in rate.items()},
        "to_converse": round(rate["door"] / rate["converse"], 3),
        "cpu_ms": {way: round(1000 * min(of_way) / calls, 2) for way, of_way in cpu.items()},
        "lost": lost,
    }


if __name__ == "__main__":
    main()
