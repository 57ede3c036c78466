"""One GRPO step of rlflow against TRL's, and against vLLM and DeepSpeed with nothing around them, on two CPU cores.

    python benchmarks/step.py [--without-trl]

The step: a Qwen2 of 3.2 million random float32 weights; 32 prompts `a+b=`, 8 responses to each of at most 256 tokens at
temperature 1; one update; two ranks of one thread; no reference model, no forward pass beside the one that trains.

- rlflow: `Trainer.fit` with ZeRO-2 and one vLLM engine on each rank, and again with `TransformersEngine`. A step lasts
  from the end of one to the end of the next, logging and weight sync included.
- The parts, on both ranks at once and after each of those steps, so that they meet the same machine: vLLM's `generate`
  alone with the same prompts, seeds and weights; then forward, backward and optimizer of a DeepSpeed engine of its own
  on the tokens that the rank has just trained on. Each phase counts with its slower rank. There are two such engines:
  transformers' own model on padded rows sorted by length, and the packed model of rlflow on inputs made beforehand.
  The faster of the two is the part.
- TRL's `GRPOTrainer`: two processes of one thread, transformers' `generate` (its vLLM does not run on a CPU), DDP, no
  gradient checkpointing. Micro-batches of 16 rows were faster than all 128 at once (`--trl-micro-batch`).

TRL is part of the environment that `make setup` makes, not of rlflow's own needs. Ratios are of medians within one run;
a round runs the sides one after another. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow import Callback, PerSample, PerToken, PromptData, Rollout, Trainer
from rlflow.algorithms import GRPO
from rlflow.data import JSONL
from rlflow.models.attention import PACKED_ATTENTION
from rlflow.models.packing import ModelInput, pack
from rlflow.models.scoring import ScoringModel
from rlflow.models.tiny import write_tiny_model
from rlflow.rewards import CallableReward
from rlflow.rollout import Completion, Sampling, TransformersEngine, VLLMEngine
from rlflow.strategies import DeepSpeedStrategy

PROMPTS, GROUP, LONGEST = 32, 8, 256
RANKS = 2
WARM_UP = 1  # steps of each side that are not counted
PADDED_MICRO_BATCHES = 8
LEARNING_RATE = 1e-6
SIDES = ("vllm", "trl", "transformers")


def main() -> None:
    """Run the sides one after another and print their steps, the ratios, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-trl", action="store_true", help="leave TRL out, and the ratios to it")
    parser.add_argument("--rounds", type=int, default=1, help="how often all sides run")
    parser.add_argument("--steps", type=int, default=4, help="of rlflow and its parts in a round, after one to warm up")
    parser.add_argument("--trl-steps", type=int, default=2, help="of TRL in a round, after one to warm up")
    parser.add_argument("--trl-micro-batch", type=int, default=16, help="rows on each rank")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # what a process of its own runs
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side == "trl":
        run_trl(given.folder, given.trl_steps, given.trl_micro_batch)
    elif given.side is not None:
        run_rlflow(given.folder, given.side, given.steps)
    else:
        compare(given)


def compare(given: argparse.Namespace) -> None:
    sides = [side for side in SIDES if not (side == "trl" and given.without_trl)]
    if "trl" in sides and importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed: run this with the environment of `make setup`, or give --without-trl")
    seconds: dict[str, list[float]] = {}
    lengths: dict[str, list[float]] = {}
    for number in range(given.rounds):
        for side in sides:
            found = in_processes_of_its_own(side, given)
            lengths.setdefault(side, []).extend(found.pop("length"))
            for name, times in found.items():
                seconds.setdefault(name, []).extend(times)
                print(f"round {number + 1}, {name}: {', '.join(f'{each:.2f}' for each in times)} s", flush=True)
    for name, times in seconds.items():
        print(f"{name}: median {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}, n={len(times)})")
    print(json.dumps(summary(seconds, lengths)))


def summary(seconds: Mapping[str, Sequence[float]], lengths: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The ratios, None where a side was left out, and what they are made of."""
    median = {name: statistics.median(times) for name, times in seconds.items()}
    trained = min("part_train_padded", "part_train_packed", key=lambda name: median[name])
    # Each step against its own parts: its number of tokens differs from step to step.
    to_parts = [
        step / (generated + trained)
        for step, generated, trained in zip(
            seconds["rlflow_vllm"], seconds["part_generate"], seconds[trained], strict=True
        )
    ]
    trl = median.get("trl")
    return {
        "benchmark": "step",
        "ratio_to_trl": trl and trl / median["rlflow_vllm"],
        "ratio_to_trl_same_engine": trl and trl / median["rlflow_transformers"],
        "ratio_to_parts": statistics.median(to_parts),
        "ratio_to_parts_spread": [min(to_parts), max(to_parts)],
        "train_part": trained,
        "seconds": median,
        "spread": {name: [min(times), max(times)] for name, times in seconds.items()},
        "mean_length": {side: statistics.mean(found) for side, found in lengths.items()},
    }


def in_processes_of_its_own(side: str, given: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each step by name, and the mean lengths of responses as `length`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_tiny_model(
            folder / "model", hidden_size=256, intermediate_size=768, layers=4, heads=4, kv_heads=2, seed=0
        )
        write_prompts(folder / "prompts.jsonl", PROMPTS * (WARM_UP + max(given.steps, given.trl_steps)))
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        options = ["--steps", given.steps, "--trl-steps", given.trl_steps, "--trl-micro-batch", given.trl_micro_batch]
        command = [sys.executable, *(torchrun if side == "trl" else []), __file__]
        command += ["--side", side, "--folder", str(folder), *map(str, options)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | ENVIRONMENT
        )
        if done.returncode:
            sys.exit(f"{done.stdout}\n{side} ended with code {done.returncode}")
        found: dict[str, list[float]] = json.loads((folder / "found.json").read_text())
        return found


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def write_prompts(file: Path, count: int) -> None:
    numbers = random.Random(0)
    prompts = [f"{numbers.randrange(100)}+{numbers.randrange(100)}=" for _ in range(count)]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def share_of_digits(text: str) -> float:
    """A reward that differs between random responses, so that there is something to learn."""
    return sum(letter.isdigit() for letter in text) / max(1, len(text))


def run_rlflow(folder: Path, engine: str, steps: int) -> None:
    module = (RecordedGRPO if engine == "vllm" else GRPO)(
        str(folder / "model"),
        CallableReward(lambda text, row: share_of_digits(text)),
        group_size=GROUP,
        max_response_length=LONGEST,
    )
    assert module.optimizer.lr == LEARNING_RATE
    rollout = RecordedVLLM() if engine == "vllm" else TransformersEngine()
    parts = Parts(folder, rollout, module) if engine == "vllm" else None
    clock = Clock(folder, f"rlflow_{engine}", parts)
    trainer = Trainer(
        run_dir=str(folder / "run"),
        max_steps=WARM_UP + steps,
        devices=RANKS,
        accelerator="cpu",
        strategy=DeepSpeedStrategy(stage=2),
        rollout=rollout,
        callbacks=[clock],
    )
    data = PromptData(JSONL(str(folder / "prompts.jsonl")), prompts_per_step=PROMPTS, prompt="prompt", shuffle=False)
    trainer.fit(module, data)


class RecordedGRPO(GRPO):
    """Keeps the micro-batches that this rank trained on in the step under way."""

    trained: list[tuple[Rollout, PerSample]]

    def actor_loss(
        self,
        rollout: Rollout,
        advantages: PerSample,
        old_logprobs: PerToken | None = None,
        ref_logprobs: PerToken | None = None,
    ) -> PerToken:
        self.trained.append((rollout, advantages))
        return super().actor_loss(rollout, advantages, old_logprobs, ref_logprobs)


class RecordedVLLM(VLLMEngine):
    """Keeps what it was last asked and answered, and answers again with nothing around vLLM."""

    def _generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> list[Completion]:
        self.asked = prompts, seeds, sampling
        self.answered = super()._generate(prompts, seeds, sampling)
        return self.answered

    def prepare_again(self) -> Callable[[], Any]:
        """The same request, ready to be sent."""
        prompts, seeds, sampling = self.asked
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = [
            self._sampling_params(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                seed=seed,
                ignore_eos=True,
                stop_token_ids=list(sampling.stop_token_ids),
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for seed in seeds
        ]
        return lambda: self._llm.generate(requests, params, use_tqdm=False)


class Clock(Callback):
    """The seconds of each step on its slower rank; between two steps runs `parts`, which is not counted."""

    def __init__(self, folder: Path, name: str, parts: Parts | None) -> None:
        self._folder = folder
        self._name = name
        self._parts = parts
        self.found: dict[str, list[float]] = {name: [], "length": []}

    def on_fit_start(self, trainer: Trainer) -> None:
        if self._parts is not None:
            self._parts.build()
        self._start()

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        seconds = {self._name: slowest(time.perf_counter() - self._started), "length": metrics["rollout/length"]}
        if self._parts is not None:
            seconds |= self._parts.measure()
        if step > WARM_UP:
            for name, value in seconds.items():
                self.found.setdefault(name, []).append(value)
        self._start()

    def on_fit_end(self, trainer: Trainer) -> None:
        if dist.get_rank() == 0:
            (self._folder / "found.json").write_text(json.dumps(self.found))

    def _start(self) -> None:
        if self._parts is not None:
            self._parts.module.trained = []
        dist.barrier()
        self._started = time.perf_counter()


class Parts:
    """What a step cannot do without, each phase alone and on both ranks at once."""

    def __init__(self, folder: Path, engine: RecordedVLLM, module: RecordedGRPO) -> None:
        self._folder = folder
        self._engine = engine
        self.module = module

    def build(self) -> None:
        from transformers import AutoModelForCausalLM

        plain = AutoModelForCausalLM.from_pretrained(self._folder / "model", dtype=torch.float32)
        packed = ScoringModel.load(self._folder / "model", torch.float32, torch.device("cpu"))
        assert plain.config._attn_implementation == "sdpa"
        assert packed.model.config._attn_implementation == PACKED_ATTENTION
        self._plain, self._packed = deepspeed_engine(plain), deepspeed_engine(packed)

    def measure(self) -> dict[str, float]:
        """Seconds of each part on its slower rank."""
        again = self._engine.prepare_again()
        generate_s, requests = timed(again)
        tokens = [tuple(request.outputs[0].token_ids) for request in requests]
        assert tokens == [completion.token_ids for completion in self._engine.answered], "the same work is done again"
        rows = [(row, weight) for rollout, weights in self.module.trained for row, weight in each_row(rollout, weights)]
        trained_tokens = sum(len(response) for (_, response), _ in rows)
        total = int(over_ranks(float(trained_tokens), dist.ReduceOp.SUM))
        padded, packed = padded_inputs(rows), [(pack(rollout), weights) for rollout, weights in self.module.trained]
        return {
            "part_generate": generate_s,
            "part_train_padded": timed(lambda: train_padded(self._plain, padded, total))[0],
            "part_train_packed": timed(lambda: train_packed(self._packed, packed, total))[0],
        }


def deepspeed_engine(model: torch.nn.Module) -> Any:
    import deepspeed

    elements = sum(parameter.numel() for parameter in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": elements, "allgather_bucket_size": elements},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return deepspeed.initialize(config=config, model=model, optimizer=optimizer, dist_init_required=False)[0]


Row = tuple[tuple[list[int], list[int]], float]  # prompt and response, advantage


def each_row(rollout: Rollout, advantages: Tensor) -> list[Row]:
    prompts = [prompt.tolist() for prompt in rollout.prompt_ids.rows()]
    responses = [row[:length].tolist() for row, length in zip(rollout.response_ids, rollout.lengths, strict=True)]
    return list(zip(zip(prompts, responses, strict=True), advantages.tolist(), strict=True))


def padded_inputs(rows: list[Row]) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of rows of like length: token ids `[b, L]` and the advantage `[b, L - 1]` of each that follows."""
    by_length = sorted(rows, key=lambda row: len(row[0][0]) + len(row[0][1]))
    inputs = []
    for index in torch.arange(len(rows)).tensor_split(PADDED_MICRO_BATCHES):
        chosen = [by_length[i] for i in index.tolist()]
        tokens = [torch.tensor(prompt + response) for (prompt, response), _ in chosen]
        weights = [
            torch.tensor([0.0] * (len(prompt) - 1) + [advantage] * len(response))
            for (prompt, response), advantage in chosen
        ]
        pad = torch.nn.utils.rnn.pad_sequence
        inputs.append((pad(tokens, batch_first=True), pad(weights, batch_first=True)))
    return inputs


def train_padded(engine: Any, inputs: list[tuple[Tensor, Tensor]], total: int) -> None:
    engine.train()
    for number, (tokens, advantages) in enumerate(inputs, 1):
        logits = engine(input_ids=tokens, use_cache=False).logits[:, :-1]
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        engine.set_gradient_accumulation_boundary(number == len(inputs))
        engine.backward((nll * advantages.flatten()).sum() * RANKS / total)
    engine.step()


def train_packed(engine: Any, inputs: list[tuple[ModelInput, Tensor]], total: int) -> None:
    engine.train()
    for number, (read, advantages) in enumerate(inputs, 1):
        logprobs, _ = engine(*read.arguments(), 1.0)
        engine.set_gradient_accumulation_boundary(number == len(inputs))
        engine.backward(-(read.unpack(logprobs) * advantages[:, None]).sum() * RANKS / total)
    engine.step()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the slower rank, and this rank's result."""
    dist.barrier()
    started = time.perf_counter()
    result = work()
    return slowest(time.perf_counter() - started), result


def slowest(seconds: float) -> float:
    return over_ranks(seconds, dist.ReduceOp.MAX)


def over_ranks(number: float, operation: Any) -> float:
    reduced = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(reduced, operation)
    return float(reduced)


def run_trl(folder: Path, steps: int, micro_batch: int) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class StepEnds(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, *arguments: Any, **more: Any) -> None:
            self.times.append(time.perf_counter())

    rows = PROMPTS * GROUP // RANKS
    config = GRPOConfig(
        output_dir=str(folder / "run"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch,
        num_generations=GROUP,
        max_completion_length=LONGEST,
        temperature=1.0,
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=WARM_UP + steps,
        shuffle_dataset=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    ends = StepEnds()
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **columns: [share_of_digits(text) for text in completions],
        args=config,
        train_dataset=Dataset.from_list([json.loads(line) for line in (folder / "prompts.jsonl").open()]),
        callbacks=[ends],
    )
    trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "reward" in entry]
    if trainer.is_world_process_zero():
        times = [end - start for start, end in zip(ends.times, ends.times[1:], strict=False)]
        (folder / "found.json").write_text(json.dumps({"trl": times, "length": lengths[WARM_UP:]}))


if __name__ == "__main__":
    main()
