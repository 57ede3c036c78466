"""The steps of `Trainer.fit`, with vLLM and with the transformers engine."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.step.parts import Parts
from benchmarks.step.recorded_parts import RecordedStrategy, RecordedVLLM
from benchmarks.step.timing import slowest
from benchmarks.step.workloads import LEARNING_RATE, RANKS, Workload, share_of_digits
from rlflow import Callback, CausalLM, Optimizer, PromptData, RLModule, Trainer
from rlflow.algorithms import GRPO, PPO
from rlflow.data import JSONL
from rlflow.functional import KL
from rlflow.rewards import CallableReward
from rlflow.rollout import TransformersEngine, VLLMEngine

WARM_UP = 1  # steps of each side that are not counted


def run_rlflow(workload: Workload, folder: Path, engine: str, steps: int) -> None:
    """Train, and leave the seconds of each step in `found.json`.

    Args:
        workload: Workload to train.
        folder: Folder with model and prompts.
        engine: `vllm`, whose steps are followed by their parts, `compiled` for vLLM with its model compiled, or
            `transformers`.
        steps: Steps that are counted.
    """
    strategy = RecordedStrategy(stage=2, precision=workload.precision)
    recorded = RecordedVLLM()
    engines = {"vllm": recorded, "compiled": VLLMEngine(enforce_eager=False), "transformers": TransformersEngine()}
    parts = Parts(workload, folder, recorded, strategy) if engine == "vllm" else None
    trainer = Trainer(
        run_dir=str(folder / "run"),
        max_steps=WARM_UP + steps,
        devices=RANKS,
        accelerator="cpu",
        strategy=strategy,
        rollout=engines[engine],
        callbacks=[Clock(folder, f"rlflow_{engine}", strategy, parts)],
    )
    data = PromptData(
        JSONL(str(folder / "prompts.jsonl")), prompts_per_step=workload.prompts, prompt="prompt", shuffle=False
    )
    trainer.fit(module_of(workload, folder), data)


def module_of(workload: Workload, folder: Path) -> RLModule:
    """The algorithm, with as many updates a step as the workload has."""
    reward = CallableReward(lambda response: share_of_digits(response))
    kind = PPO if workload.algorithm == "ppo" else GRPO
    actor = CausalLM(
        str(folder / "model"),
        optimizer=Optimizer(lr=LEARNING_RATE),
        samples_per_update=None if workload.updates == 1 else workload.rows // workload.updates,
        lora=workload.lora,
    )
    module: RLModule = kind(actor, reward, workload.group, workload.longest, kl=KL(workload.kl_coef))
    return module


class Clock(Callback):
    """The seconds of each step on its slower rank; between two steps runs `parts`, which is not counted."""

    def __init__(self, folder: Path, name: str, strategy: RecordedStrategy, parts: Parts | None) -> None:
        self._folder = folder
        self._name = name
        self._strategy = strategy
        self._parts = parts
        self.found: dict[str, list[float]] = {}

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        if self._parts is not None:
            self._parts.build()
        self._start()

    def on_step_end(self, trainer: Trainer, module: Any, step: int, metrics: Mapping[str, float]) -> None:
        seconds = {self._name: slowest(time.perf_counter() - self._started)}
        logged = {name: value for name, value in metrics.items() if name.startswith("time/")}
        seconds |= {f"{self._name} {name}": value for name, value in logged.items()}
        seconds[f"length_{self._name}"] = metrics["rollout/length"]
        if self._parts is not None:
            seconds |= self._parts.measure()
        if step > WARM_UP:
            for name, value in seconds.items():
                self.found.setdefault(name, []).append(value)
        self._start()

    def on_fit_end(self, trainer: Trainer, module: Any) -> None:
        if dist.get_rank() == 0:
            (self._folder / "found.json").write_text(json.dumps(self.found))

    def _start(self) -> None:
        self._strategy.forget()
        dist.barrier()
        self._started = time.perf_counter()
