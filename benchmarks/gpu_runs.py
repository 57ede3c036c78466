"""The cases of `gpu.py` that are whole runs of GRPO, on one rank or two, and the speed of a larger model."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_checks import LOGPROB_LIMIT, Found, small_family, small_model, strategy_of
from step.workloads import W1, share_of_digits

from rlflow import Callback, CausalLM, Optimizer, PromptData, Trainer
from rlflow.algorithms import GRPO, PPO
from rlflow.configs.cells import count
from rlflow.data import JSONL, RandomRows
from rlflow.data.mixture import settings_of
from rlflow.models.handle import ForwardPlan
from rlflow.models.logprobs import chunk_elements_on, token_logprobs
from rlflow.models.packing import take
from rlflow.models.tiny import write_tiny_model, write_tiny_vision_model
from rlflow.models.weights import fingerprint
from rlflow.rewards import CallableReward
from rlflow.rollout import TransformersEngine, VLLMEngine
from rlflow.run.prepare import read_graph
from rlflow.settings import Place
from rlflow.simulate.designs import node_seconds
from rlflow.simulate.hardware import PRESETS
from rlflow.simulate.simulation import Simulation
from rlflow.types import Ragged
from rlflow.values.batch import TokenRows
from rlflow.values.columns import to_device

GIB = 2**30
STEPS = 4
WARM_UP = 1  # steps that are not counted
SYNC = ("sync/verified_tensors", "sync/logprob_gap", "time/sync")
ALARMS = ("logprob_gap_max", "logprob_gap_uncertain", "logprob_spread")  # by which a run ends, see docs/metrics.md
PROMPT, LONGEST = 8, 512
TABLE_LIMIT = 1.1  # of memory that was used, over the memory in the table
SPEED = {"hidden_size": 2048, "intermediate_size": 8192, "layers": 16, "heads": 16, "kv_heads": 8}
# Two layers of Qwen2.5-7B, whose matrices are those of the whole model.
OF_7B = {"hidden_size": 3584, "intermediate_size": 18_944, "layers": 2, "heads": 28, "kv_heads": 4}
VOCABULARY_OF_7B, TOKENS = 152_064, 16_384
SHAPES = {"1B": SPEED, "7B": OF_7B}
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "4090": 165}  # dense bf16
ENGINES = {"vllm": VLLMEngine, "transformers": TransformersEngine}


def run_grpo(
    folder: Path,
    device: str,
    devices: int,
    *,
    strategy: str,
    engine: str = "vllm",
    precision: str = "fp32",
    tensor_parallel_size: int = 1,
    layers_over: int = 1,
    experts_over: int = 0,
    apart: bool = False,
    pictures: bool = False,
    max_staleness: int = 0,
    critic: bool = False,
    **of_actor: Any,
) -> Found:
    """A few steps that change the weights a lot: finite, every sync verified, engine and trainer agree.

    `layers_over` ranks divide each layer in training, and `experts_over` the experts of a mixture of experts. With
    `critic`, PPO trains instead of GRPO. `of_actor` are settings of the actor.
    """
    model, prompts = folder / "model", folder / "prompts.jsonl"
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:  # the others are started once this has been written
        if pictures:
            write_tiny_vision_model(model)
        elif experts_over:
            small_family(folder, "qwen3_moe")
        else:
            small_model(folder)
        W1.write_prompts(prompts, 8 * STEPS)
    kept = Kept(skip=0)
    placement: Any = {"rollout": 0, "actor": 1} if apart else None
    if layers_over > 1 or experts_over:
        sizes = {"tensor_parallel_size": layers_over, "expert_parallel_size": max(1, experts_over)}
        placement = {"actor": Place(**sizes)}
    trainer = Trainer(
        run_dir=str(folder / "run"),
        max_steps=STEPS,
        devices=devices,
        accelerator=device,  # type: ignore[arg-type]
        strategy=strategy_of(strategy, precision),
        rollout=VLLMEngine(tensor_parallel_size, gpu_memory_utilization=0.3, kv_cache_gib=0.25, max_model_len=256)
        if engine == "vllm"
        else TransformersEngine(),
        placement=placement,
        max_staleness=max_staleness,
        callbacks=[kept],
    )
    reward = CallableReward(lambda response: share_of_digits(response))
    algorithm = PPO if critic else GRPO
    actor = CausalLM(str(model), optimizer=Optimizer(lr=3e-3), **of_actor)
    module = algorithm(actor, reward, group_size=4, max_response_length=32)
    data = PromptData(JSONL(str(prompts)), prompts_per_step=8, prompt="prompt")
    if pictures:
        data = PromptData(RandomRows(count, 8 * STEPS), prompts_per_step=8, prompt="question", images="image")
    trainer.fit(module, data)
    # Where steps overlap, the first ones end before what is synced, or compared, ahead of them is theirs.
    logged = {name: [step[name] for step in kept.steps if name in step] for name in SYNC}
    verified, gaps = logged["sync/verified_tensors"], logged["sync/logprob_gap"]
    values = {
        "logprob_gap": max(gaps, default=math.inf),
        **{name: max(step.get(f"sync/{name}", 0.0) for step in kept.steps) for name in ALARMS},
        "not_finite": float(sum(not all(map(math.isfinite, step.values())) for step in kept.steps)),
        "steps_missing": float(STEPS - len(kept.steps)),
        "steps_without_sync": float(STEPS - sum(count > 0 for count in verified)),
        "time/step": kept.median(lambda step: step["time/step"]),
        "time/sync": statistics.median(logged["time/sync"]),
    }
    limits = {"logprob_gap": LOGPROB_LIMIT[precision], "not_finite": 0, "steps_missing": 0}
    return {"values": values, "limits": limits | {"steps_without_sync": 2 * max_staleness}}


def measure_speed(
    folder: Path, device: str, devices: int, *, engine: str, strategy: str, steps: int = 3, shape: str = "1B"
) -> Found:
    """A step in bf16 with gradient checkpointing: 32 prompts `a+b=`, 8 responses of at most 512 tokens, one update.

    Medians over the steps: tokens generated and trained a second, the share of the chip's dense bf16 peak that training
    reaches (6 operations for each weight and token; what checkpointing computes twice is not counted), and the GPU
    memory that each role took to set up. Then what `against_predictions` compares.
    """
    write_tiny_model(folder / "model", **SHAPES[shape])
    W1.write_prompts(folder / "prompts.jsonl", W1.prompts * (WARM_UP + steps))
    memory: dict[str, float] = {}
    kept, peaks = Kept(skip=WARM_UP), Peaks()
    trainer = Trainer(
        run_dir=str(folder / "run"),
        max_steps=WARM_UP + steps,
        accelerator=device,  # type: ignore[arg-type]
        strategy=weighed(strategy_of(strategy, "bf16"), "setup_role", "actor_gib", memory),
        rollout=weighed(ENGINES[engine](), "setup", "rollout_gib", memory),
        callbacks=[kept, peaks],
    )
    module = GRPO(
        CausalLM(str(folder / "model"), gradient_checkpointing=True),
        CallableReward(lambda response: share_of_digits(response)),
        group_size=W1.group,
        max_response_length=LONGEST,
    )
    rows = JSONL(str(folder / "prompts.jsonl"))
    data = PromptData(rows, prompts_per_step=W1.prompts, max_prompt_length=PROMPT, prompt="prompt")
    trainer.fit(module, data)
    trained = kept.median(lambda step: step["rollout/tokens"] / step["time/actor_loss"])
    values = {
        "step_s": kept.median(lambda step: step["time/step"]),
        "generated_tokens_per_s": kept.median(lambda step: step["rollout/tokens"] / step["time/rollout"]),
        "trained_tokens_per_s": trained,
        "sync_s": kept.median(lambda step: step["time/sync"]),
        "logprob_gap": max(step["sync/logprob_gap"] for step in kept.steps),
        **memory,
    }
    predicted, limits = against_predictions(trainer, module, data, kept, peaks)
    values |= predicted
    chip = torch.cuda.get_device_name()
    peak = next((tflops for name, tflops in PEAK_TFLOPS.items() if name in chip), None)
    if peak is not None:
        values["share_of_peak"] = 6 * weights_of(folder / "run" / "model") * trained / (peak * 1e12)
    return {"values": values, "limits": {"logprob_gap": LOGPROB_LIMIT["bf16"], **limits}}


def against_predictions(
    trainer: Trainer, module: GRPO, data: PromptData, kept: Kept, peaks: Peaks
) -> tuple[dict[str, float], dict[str, float]]:
    """Measured memory over that in the run's memory table, and seconds over those of `rlflow simulate`.

    `generating_of_table` is the largest memory of torch's allocator while the step generates, over that in the table,
    and `training_of_table` the same while it trains. vLLM's memory is not in torch's allocator. `gpu_gib` is all memory
    of the GPU that is in use, as in `nvidia-smi`.
    """
    chip = torch.cuda.get_device_properties(0)
    preset = next((name for name in PRESETS if name in chip.name.lower()), None)
    simulation = Simulation(
        module,
        read_graph(module, settings_of(data.train)),
        data,
        trainer,
        nodes=1,
        name=chip.name,
        hardware=replace(PRESETS[preset or "h100"], memory=float(chip.total_memory), gpus_per_node=1),
        scaling="strong",
        prompt_tokens=None,
        response_tokens=kept.median(lambda step: step["rollout/length"]),
    )
    memory = simulation.predicted.memory
    values = {"gpu_gib": peaks.used / GIB, "reserved_gib": torch.cuda.max_memory_reserved() / GIB}
    limits = {}
    for phase, table in (("generating", memory.generating), ("training", memory.training)):
        values |= {f"{phase}_gib": peaks.allocated[phase] / GIB, f"{phase}_of_table": peaks.allocated[phase] / table}
        limits[f"{phase}_of_table"] = TABLE_LIMIT
    if preset is not None:
        timeline = simulation.predicted.timelines["rlflow"]
        seconds = node_seconds(timeline.works.values()) | {"step": timeline.seconds}
        values |= {f"predicted_{name}_s": predicted for name, predicted in seconds.items() if predicted > 0.01}
    return values, limits


def weighed(part: Any, method: str, name: str, memory: dict[str, float]) -> Any:
    """`part`, whose `method` writes down how many GiB of the GPU it took."""
    called = getattr(part, method)

    def weigh(*arguments: Any, **more: Any) -> None:
        free = torch.cuda.mem_get_info()[0]
        called(*arguments, **more)
        memory[name] = (free - torch.cuda.mem_get_info()[0]) / GIB

    setattr(part, method, weigh)
    return part


def measure_prefixes(folder: Path, device: str, devices: int, *, prompt: int, response: int, samples: int) -> Found:
    """Forward and backward passes in bf16 over the samples of four prompts: shared prefixes over whole rows.

    Seconds are medians of five after one to warm up, the two ways in turn; GiB what a pass adds to torch's peak.
    """
    model = write_tiny_model(folder / "model", **SPEED, max_position=16_384)
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 1, prompt), (4, samples, response))
    prompts, responses = (torch.randint(2, 120, shape, generator=generator) for shape in shapes)
    both = (part.expand(4, samples, -1).flatten(0, 1).tolist() for part in (prompts, responses))
    rows = to_device(TokenRows.padded(*map(Ragged.from_lists, both)), torch.device(device))
    handle = CausalLM(str(model), gradient_checkpointing=True)
    loaded = handle.load(model, torch.bfloat16, torch.device(device))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    gib = {}
    for repeat in range(6):
        for shares in (True, False):
            handle.attach(loaded, ForwardPlan(16_384, share_prefixes=shares))
            loaded.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held, start = torch.cuda.memory_allocated(), time.perf_counter()
            for part in handle.plan.micro_batches(rows):
                with handle.training():
                    handle.logprobs(take(rows, part)).sum().backward()
            torch.cuda.synchronize()
            gib[shares] = (torch.cuda.max_memory_allocated() - held) / GIB
            if repeat:
                seconds[shares].append(time.perf_counter() - start)
    shared, whole = (statistics.median(seconds[way]) for way in (True, False))
    values = {"shared_s": shared, "whole_s": whole, "ratio": shared / whole, "gib_ratio": gib[True] / gib[False]}
    return {"values": values, "limits": {}}


def measure_head(folder: Path, device: str, devices: int) -> Found:
    """The output layer of Qwen2.5-7B in bf16 over 16,384 tokens, forward and backward, by the logits of a chunk.

    Seconds, and GiB that the passes add to torch's peak.
    """
    hidden = torch.randn(TOKENS, OF_7B["hidden_size"], dtype=torch.bfloat16, device=device, requires_grad=True)
    shape = VOCABULARY_OF_7B, OF_7B["hidden_size"]
    weight = (0.01 * torch.randn(shape, dtype=torch.bfloat16, device=device)).requires_grad_()
    targets = torch.randint(VOCABULARY_OF_7B, (TOKENS,), device=device)

    def passes(chunk: int) -> None:
        token_logprobs(hidden, weight, targets, chunk_elements=chunk)[0].sum().backward()
        hidden.grad = weight.grad = None

    values = {"default": float(chunk_elements_on(weight.device))}
    for power in (26, 27, 28):
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        values[f"seconds_2**{power}"] = median_seconds(lambda power=power: passes(2**power))
        values[f"gib_2**{power}"] = (torch.cuda.max_memory_allocated() - held) / GIB
    return {"values": values, "limits": {}}


def measure_fingerprint(folder: Path, device: str, devices: int) -> Found:
    """Fingerprints of 1 GiB in bf16, by the chunks that are multiplied together; all of them are that of the CPU."""
    weight = torch.randn(2**29, device=device, dtype=torch.bfloat16)
    expected = fingerprint(weight.cpu()).item()
    values = {f"seconds_{n}": median_seconds(lambda n=n: fingerprint(weight, together=n)) for n in (1, 8, 64)}
    values["differ"] = float(sum(fingerprint(weight, together=n).item() != expected for n in (1, 8, 64)))
    return {"values": values, "limits": {"differ": 0}}


def median_seconds(compute: Callable[[], Any]) -> float:
    """Seconds of a GPU: the median of five, after one to warm up."""
    seconds = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        compute()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


class Peaks(Callback):
    """The most bytes that torch's allocator gave out while the steps generated and trained, and that the GPU had used.

    A node that scores counts as generating.
    """

    def __init__(self) -> None:
        self.allocated = {"generating": 0, "training": 0}
        self.used = 0
        self._phase = "generating"

    def on_task_start(self, trainer: Any, module: Any, task: str, step: int) -> None:
        self._note()
        self._phase = "training" if task.startswith("train") else "generating"

    def on_step_end(self, trainer: Any, module: Any, step: int, metrics: Any) -> None:
        self._note()

    def _note(self) -> None:
        free, total = torch.cuda.mem_get_info()
        self.used = max(self.used, total - free)
        self.allocated[self._phase] = max(self.allocated[self._phase], torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()


class Kept(Callback):
    """The metrics of all steps but the first `skip`."""

    def __init__(self, skip: int) -> None:
        self.skip = skip
        self.steps: list[Mapping[str, float]] = []

    def on_step_end(self, trainer: Trainer, module: Any, step: int, metrics: Mapping[str, float]) -> None:
        if step > self.skip:
            self.steps.append(dict(metrics))

    def median(self, of: Callable[[Mapping[str, float]], float]) -> float:
        return statistics.median(of(metrics) for metrics in self.steps)


def weights_of(model: Path) -> int:
    """Number of weights of a saved model."""
    from safetensors import safe_open

    index = model / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    count = 0
    for name in files:
        with safe_open(model / name, "pt") as file:
            count += sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118 (not a dict)
    return count
