"""The parts that a step needs at least, each alone and on both ranks at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.step.forward_backward import WAYS, OwnForward, build, deepspeed_engine, inputs, score, train
from benchmarks.step.gemm import forward_operations, gemm_rate, training_operations
from benchmarks.step.recorded_parts import Pass, RecordedStrategy, RecordedVLLM
from benchmarks.step.timing import over_ranks, timed
from benchmarks.step.workloads import RANKS, Workload

HOPELESS = 1.5  # a way that takes so many times the fastest's seconds in the first step is not tried again


class Parts:
    """Measures the parts of the step that has just ended.

    Args:
        workload: Workload that is trained.
        folder: Folder with its model.
        engine: Engine that generated.
        strategy: Strategy that trained.
    """

    def __init__(self, workload: Workload, folder: Path, engine: RecordedVLLM, strategy: RecordedStrategy) -> None:
        self._workload = workload
        self._folder = folder
        self._engine = engine
        self._strategy = strategy
        self._dropped: dict[str, float] = {}  # seconds in the first step, by way
        self._first = True

    def build(self) -> None:
        """Load the models; they keep their first weights, and cost what the run's cost."""
        self._models: dict[tuple[str, bool], nn.Module] = {}
        self._engines: dict[tuple[str, bool], Any] = {}
        for critic in (False, True) if self._workload.algorithm == "ppo" else (False,):
            for way in WAYS:
                model = build(way, self._folder, self._workload, critic)
                self._models[way, critic] = model
                self._engines[way, critic] = deepspeed_engine(model, self._workload)
        self._strategy.forget()

    def measure(self) -> dict[str, float]:
        """Seconds of each part on its slower rank, and operations of all ranks over `gemm_rate` of them."""
        rate = gemm_rate(self._workload)
        found = {"gemm_rate": rate}
        found |= self._generate(rate)
        for role, passes in self._strategy.passes.items():
            critic = role == "critic"
            forward, trained = ([p for p in passes if p.trains is trains] for trains in (False, True))
            if forward:
                models = {way: self._models[way, critic] for way in WAYS}
                found |= self._fastest(f"{role}_forward", forward, models, score)
                found[f"gemm_{role}_forward"] = self._seconds_of_gemm(_forward_operations, forward, rate)
            if trained:
                engines = {way: self._engines[way, critic] for way in WAYS}
                found |= self._fastest(f"{role}_train", trained, engines, train)
                found[f"gemm_{role}_train"] = self._seconds_of_gemm(training_operations, trained, rate)
        self._strategy.forget()
        self._first = False
        return found | self._dropped

    def _fastest(
        self, part: str, passes: Sequence[Pass], models: Mapping[str, Any], work: Callable[[Any, Any], None]
    ) -> dict[str, float]:
        found: dict[str, float] = {}
        for way in WAYS:
            name = f"part_{part}_{way}"
            if f"dropped_{name}" not in self._dropped:
                found[name] = timed(partial(work, models[way], inputs(way, passes)))[0]
        if self._first:
            too_slow = {name: seconds for name, seconds in found.items() if seconds > HOPELESS * min(found.values())}
            self._dropped |= {f"dropped_{name}": seconds for name, seconds in too_slow.items()}
        return found

    def _seconds_of_gemm(
        self, operations: Callable[[Workload, Sequence[int]], float], passes: Sequence[Pass], rate: float
    ) -> float:
        lengths = [length for each in passes for length in each.lengths]
        return over_ranks(operations(self._workload, lengths)) / (RANKS * rate)

    def _generate(self, rate: float) -> dict[str, float]:
        seconds, requests = timed(self._engine.prepare_again())
        tokens = [tuple(request.outputs[0].token_ids) for request in requests]
        assert tokens == [completion.token_ids for completion in self._engine.answered], "the same work is done again"
        prompts = [tuple(prompt) for prompt in self._engine.asked[0]]
        lengths = [len(response) for response in tokens]
        longest = int(over_ranks(max(lengths), torch.distributed.ReduceOp.MAX))
        running = [sum(length > step for length in lengths) for step in range(longest)]
        own = self._models["padded", False]
        assert isinstance(own, OwnForward)
        sizes = self._workload.sizes
        operations = forward_operations(sizes, [len(prompt) for prompt in set(prompts)])
        for prompt, length in zip(prompts, lengths, strict=True):
            operations += forward_operations(sizes, [len(prompt) + length]) - forward_operations(sizes, [len(prompt)])
        return {
            "part_generate_vllm": seconds,
            "gemm_generate": over_ranks(operations) / (RANKS * rate),
            "engine_steps": longest,
            "model_of_engine_steps": timed(lambda: _decode(own, running))[0],
        }


@torch.no_grad()
def _decode(own: OwnForward, running: Sequence[int]) -> None:
    """Transformers' model on one token of each response that is not at its end, step by step, without a cache."""
    own.eval()
    for rows in running:
        if rows:
            own(torch.zeros(rows, 1, dtype=torch.int64), None, torch.arange(rows), torch.zeros(rows, dtype=torch.int64))


def _forward_operations(workload: Workload, lengths: Sequence[int]) -> float:
    return forward_operations(workload.sizes, lengths)
