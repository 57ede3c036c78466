"""Conversations with slow environments: each continued as soon as it is answered, against other ways.

    python -m benchmarks.turns

`loop` is what rlflow does; `lockstep` the same with `lockstep: true`; `one_by_one` the first conversations one after
another. The bound is the larger of two: the conversation that waits longest, alone, and the engine's time for the
same turns given all at once. Delays are log-normal, drawn from the row and the turn, so all ways have the same; each
turn has the same tokens in all of them, which is checked. Ways take turns, and their fastest are compared. Of the
rank's own time on the processor, `cpu_to_turns_at_once` is the share that the turns given all at once take.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.simulated_delays import delay
from benchmarks.small_run import on_ranks
from rlflow import Environment
from rlflow.context.conversations import ConversationRunner, ConverseCall
from rlflow.databuffer.transport import Transport
from rlflow.environments.bridge import message
from rlflow.environments.conversation_format import bridge_of
from rlflow.models.tiny import write_tiny_model
from rlflow.rollout import RankInfo, RolloutEngine, Sampling, TransformersEngine, VLLMEngine
from rlflow.rollout.engine import GenerationRequest
from rlflow.values.layout import Layout
from rlflow.values.path import RowPath

CONTEXT = 1024
DEFINED = "benchmarks.simulated_delays.Delayed"
SECONDS = 300.0  # that a call may take


def main() -> None:
    """Print a line for each delay, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4, help="of each conversation")
    parser.add_argument("--tokens", type=int, default=32, help="of a turn, at most")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--seqs", type=int, default=16, help="responses that the engine generates at once")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.01, 1.0], help="medians, seconds")
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts")
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    given = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(
            Path(folder) / "model",
            hidden_size=given["hidden"],
            intermediate_size=3 * given["hidden"],
            layers=given["layers"],
            max_position=CONTEXT,
        )
        (found,) = on_ranks(1, run, model, given)
    for each in found:
        print(json.dumps(each))
    print(json.dumps({"benchmark": "turns", **given, "found": found}))


def run(folder: Path, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All delays, with one engine."""
    vllm = given["engine"] == "vllm"
    engine = VLLMEngine(max_num_seqs=given["seqs"], kv_cache_gib=0.5) if vllm else TransformersEngine(given["seqs"])
    engine.setup(str(folder), RankInfo(torch.float32, torch.device("cpu")))
    conversations = Conversations(folder, engine, given)
    found = [compared(conversations, median_s, given) for median_s in given["delays"]]
    conversations.close()
    engine.close()
    return found


def compared(conversations: Conversations, median_s: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds by way, and ratios of the fastest: what else the machine does only adds."""
    everyone = range(given["conversations"])
    sums = [sum(delay(place, turn, median_s) for turn in range(given["turns"])) for place in everyone]
    longest = max(everyone, key=lambda place: (sums[place], place))
    few = everyone[: max(1, len(everyone) // (16 if median_s >= 1 else 8))]
    ways: dict[str, Callable[[], Any]] = {
        "loop": lambda: conversations.run(everyone, median_s),
        "lockstep": lambda: conversations.run(everyone, median_s, lockstep=True),
        "one_by_one": lambda: conversations.one_by_one(few, median_s),
        "longest_alone": lambda: conversations.run([longest], median_s),
        "turns_at_once": conversations.turns_at_once,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    said: dict[str, Any] = {}
    for _ in range(given["rounds"]):
        for way, run in ways.items():
            conversations.forget()
            start, start_cpu = time.perf_counter(), time.process_time()
            tokens = run()
            seconds[way].append(time.perf_counter() - start)
            cpu[way].append(time.process_time() - start_cpu)
            for name, of_name in tokens.items():
                assert said.setdefault(name, of_name) == of_name, f"{way} gave conversation {name} other tokens"
    fastest = {way: min(of_way) for way, of_way in seconds.items()}
    bound = max(fastest["longest_alone"], fastest["turns_at_once"])
    rate = {"loop": len(everyone), "lockstep": len(everyone), "one_by_one": len(few)}
    return {
        "median_s": median_s,
        "seconds": {way: [round(each, 3) for each in sorted(of_way)] for way, of_way in seconds.items()},
        "conversations_per_s": {way: round(count / fastest[way], 3) for way, count in rate.items()},
        "to_bound": round(bound / fastest["loop"], 3),
        "cpu_to_turns_at_once": round(min(cpu["turns_at_once"]) / min(cpu["loop"]), 3),
        "to_lockstep": round(fastest["lockstep"] / fastest["loop"], 3),
        "to_one_by_one": round(fastest["one_by_one"] / len(few) * len(everyone) / fastest["loop"], 2),
    }


class Conversations:
    """Holds conversations with `Delayed`, and gives the tokens of each by its place.

    Attributes:
        made: All turns of all conversations.
    """

    def __init__(self, folder: Path, engine: RolloutEngine, given: Mapping[str, Any]) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self._runner = ConversationRunner(
            cache(partial(bridge_of, tokenizer=tokenizer)),
            lambda row: [message("system", "count")],
            CONTEXT,
            tokenizer.decode,
            torch.float32,
            seed=0,
            transport=Transport(),
        )
        self._engine, self._given = engine, given
        self._weights: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._version = 0
        self._sampling = Sampling(CONTEXT // 2, 1.0)
        many, one = given["conversations"], 1
        self._environment = self._made(many)
        self._alone = self._made(one)
        self.forget()
        self._record()  # starts workers too

    def forget(self) -> None:
        """Empty the engine's cache of prefixes."""
        self._version += 1
        self._engine.update_weights([list(self._weights.named_parameters())], self._version)

    def run(
        self, places: Sequence[int], median_s: float, lockstep: bool = False, alone: bool = False
    ) -> dict[int, Any]:
        """Side by side, or each when the one before it is over."""
        environment = self._alone if alone else self._environment
        environment.lockstep = lockstep
        rows = [{"place": place, "turns": self._given["turns"], "median_s": median_s} for place in places]
        path = RowPath(torch.tensor(places)[:, None], ("batch",))
        call = ConverseCall(0, "rollout", "actor", {"actor": self._version}, Layout((0,), 1))
        ended = self._runner.run({"actor": self._engine}, environment, rows, path, 1, self._sampling, call)[1]
        return {place: each.tokens for place, each in zip(places, ended, strict=True)}

    def close(self) -> None:
        """End the workers."""
        self._runner.close()

    def one_by_one(self, places: Sequence[int], median_s: float) -> dict[int, Any]:
        """One after another."""
        return self.run(places, median_s, alone=True)

    def turns_at_once(self) -> dict[int, Any]:
        """Let the engine generate all turns of all conversations; none waits for another."""
        limits = tuple(turn.longest for turn in self.made)
        sampling = replace(self._of_turns, max_tokens=max(limits), limits=limits)
        prompts, seeds = [turn.prompt for turn in self.made], [turn.seed for turn in self.made]
        self._engine.generate(prompts, seeds, sampling, self._version)
        return {}

    def _record(self) -> None:
        """Hold them all once, and note the turns that the engine is given."""
        step, turns = self._engine.step, list[GenerationRequest]()

        def recorded(new: Mapping[int, GenerationRequest], sampling: Sampling, version: int) -> dict[int, Any]:
            turns.extend(new.values())
            self._of_turns = sampling
            return step(new, sampling, version)

        self._engine.step = recorded  # type: ignore[method-assign]
        self.run(range(self._given["conversations"]), 0.0)
        del self._engine.step
        self.made = turns

    def _made(self, workers: int) -> Environment:
        return Environment(
            DEFINED,
            max_turns=self._given["turns"],
            max_turn_length=self._given["tokens"],
            timeout_s=SECONDS,
            workers=workers,
        )


if __name__ == "__main__":
    main()
