"""The steps of TRL's `GRPOTrainer`: two processes of one thread, transformers' `generate`, DDP.

Its vLLM does not run on a CPU, and TRL 1 has no PPO. Its fastest settings are taken: no gradient checkpointing, in bf16
the weights themselves and their optimizer in bf16, without the float32 masters that rlflow keeps.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.step.rlflow_side import WARM_UP
from benchmarks.step.workloads import LEARNING_RATE, RANKS, Workload, share_of_digits


def micro_batches(workload: Workload) -> list[int]:
    """Those that are tried: 8, 16, 32 and all rows of a rank."""
    rows = workload.rows // RANKS
    return sorted({size for size in (8, 16, 32, rows) if size <= rows})


def run_trl(workload: Workload, folder: Path, steps: int, micro_batch: int) -> None:
    """Train, and leave the seconds of each step in `found.json`."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class StepEnds(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, *arguments: Any, **more: Any) -> None:
            self.times.append(time.perf_counter())

    config = GRPOConfig(
        output_dir=str(folder / "run"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": str(workload.dtype).removeprefix("torch.")},
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=workload.rows // RANKS // micro_batch,
        num_generations=workload.group,
        max_completion_length=workload.longest,
        temperature=1.0,
        beta=workload.kl_coef,
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
        peft_config=_peft(workload),
    )
    trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "reward" in entry]
    if trainer.is_world_process_zero():
        times = [end - start for start, end in zip(ends.times, ends.times[1:], strict=False)]
        found = {f"trl_{micro_batch}": times, f"length_trl_{micro_batch}": lengths[WARM_UP:]}
        (folder / "found.json").write_text(json.dumps(found))


def _peft(workload: Workload) -> Any:
    if workload.lora is None:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=workload.lora.rank,
        lora_alpha=workload.lora.alpha,
        lora_dropout=workload.lora.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
