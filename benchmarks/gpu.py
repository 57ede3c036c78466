"""One GRPO step on one CUDA GPU: bf16, gradient checkpointing, ZeRO-2 and ZeRO-3, each installed rollout engine.

    python benchmarks/gpu.py [--layers 16] [--hidden 2048] [--peak-tflops 989]

The model is a Qwen2 with random weights (1.0 billion by default, vocabulary 128); 32 prompts `a+b=`, 8 responses to
each of at most 512 tokens, one update, no reference model. Each of the four settings runs in a process of its own.
Reported are medians over steps: tokens generated and trained a second, the share of the chip's dense bf16 peak that
training reaches (6 operations for each weight and token; what checkpointing computes twice is not counted), and the
GPU memory that each role took to set up, with the peak of torch's allocator over the whole run.

This has never been run: the machine that rlflow was written on has no GPU. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from step import GROUP, PROMPTS, WARM_UP, share_of_digits, write_prompts

from rlflow import Callback, PromptData, Trainer
from rlflow.algorithms import GRPO
from rlflow.data import JSONL
from rlflow.models.tiny import write_tiny_model
from rlflow.rewards import CallableReward
from rlflow.rollout import TransformersEngine, VLLMEngine
from rlflow.strategies import DeepSpeedStrategy

GIB = 2**30
LONGEST = 512
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "4090": 165}  # dense bf16
ENGINES = {"vllm": VLLMEngine, "transformers": TransformersEngine}


def main() -> None:
    """Run each setting in a process of its own, and print a line for each and one of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="after one to warm up")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048, help="width; feed-forward layers are four times as wide")
    parser.add_argument("--peak-tflops", type=float, help="of the chip; known ones are found by name")
    parser.add_argument("--setting", nargs=2, metavar=("ENGINE", "STAGE"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU here; benchmarks/step.py measures a step on the CPU")
    if given.setting is not None:
        run(given.folder, given.setting[0], int(given.setting[1]), given.steps)
        return
    chip = torch.cuda.get_device_name()
    peak = given.peak_tflops or next((tflops for name, tflops in PEAK_TFLOPS.items() if name in chip), None)
    if peak is None:
        sys.exit(f"the bf16 peak of {chip!r} is not known here; give --peak-tflops")
    found = {}
    for engine, stage in [(engine, stage) for engine in ENGINES for stage in (2, 3)]:
        if engine == "vllm" and find_spec("vllm") is None:
            continue
        figures = found[f"{engine}_zero{stage}"] = in_a_process_of_its_own(engine, stage, given)
        figures["share_of_peak"] = 6 * figures["weights"] * figures["trained_tokens_per_s"] / (peak * 1e12)
        print(f"{engine}, ZeRO-{stage}: {figures}", flush=True)
    print(json.dumps({"benchmark": "gpu", "chip": chip, "peak_tflops": peak, "settings": found}))


def in_a_process_of_its_own(engine: str, stage: int, given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wide = {"hidden_size": given.hidden, "intermediate_size": 4 * given.hidden, "layers": given.layers}
        write_tiny_model(folder / "model", **wide, heads=given.hidden // 128, kv_heads=given.hidden // 256)
        write_prompts(folder / "prompts.jsonl", PROMPTS * (WARM_UP + given.steps))
        options = ["--setting", engine, str(stage), "--folder", scratch, "--steps", str(given.steps)]
        subprocess.run([sys.executable, __file__, *options], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        figures: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return figures


def run(folder: Path, engine: str, stage: int, steps: int) -> None:
    module = GRPO(
        str(folder / "model"),
        CallableReward(lambda text, row: share_of_digits(text)),
        group_size=GROUP,
        max_response_length=LONGEST,
        gradient_checkpointing=True,
    )
    memory: dict[str, float] = {}
    strategy = weighed(DeepSpeedStrategy, "setup_role", "actor", memory)(stage=stage, precision="bf16")
    rollout = weighed(ENGINES[engine], "setup", "rollout", memory)()
    data = PromptData(JSONL(str(folder / "prompts.jsonl")), prompts_per_step=PROMPTS, prompt="prompt")
    kept = Kept()
    trainer = Trainer(
        run_dir=str(folder / "run"),
        max_steps=WARM_UP + steps,
        accelerator="cuda",
        strategy=strategy,
        rollout=rollout,
        callbacks=[kept],
    )
    trainer.fit(module, data)
    figures = {
        "step_s": kept.median(lambda metrics: metrics["time/step"]),
        "generated_tokens_per_s": kept.median(lambda metrics: metrics["rollout/tokens"] / metrics["time/rollout"]),
        "trained_tokens_per_s": kept.median(lambda metrics: metrics["rollout/tokens"] / metrics["time/actor_loss"]),
        "sync_s": kept.median(lambda metrics: metrics["time/syncweights"]),
        "memory_gib": memory | {"peak": torch.cuda.max_memory_allocated() / GIB},
        "weights": weights_of(folder / "run" / "model"),
    }
    (folder / "found.json").write_text(json.dumps(figures))


def weighed(cls: Any, method: str, name: str, memory: dict[str, float]) -> Any:
    """`cls` whose `method` writes down how many GiB of the GPU it took."""

    def weigh(self: Any, *arguments: Any, **more: Any) -> None:
        free = torch.cuda.mem_get_info()[0]
        getattr(super(subclass, self), method)(*arguments, **more)
        memory[name] = (free - torch.cuda.mem_get_info()[0]) / GIB

    subclass = type(cls.__name__, (cls,), {method: weigh})
    return subclass


class Kept(Callback):
    """The metrics of all steps but those to warm up."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        if step > WARM_UP:
            self.steps.append(metrics)

    def median(self, of: Any) -> float:
        return statistics.median(of(metrics) for metrics in self.steps)


def weights_of(model: Path) -> int:
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 (not a dict)


if __name__ == "__main__":
    main()
