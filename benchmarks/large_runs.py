"""Two steps of GRPO with a model of 0.6 billion parameters on two ranks of a CPU, and with one of 3 billion by LoRA.

    python benchmarks/large_runs.py 0.6b --strategy fsdp
    python benchmarks/large_runs.py 3b

The models have the shapes of Qwen3-0.6B and Qwen2.5-3B, seeded random weights and bfloat16 files. Ranks hold float32
masters and Adam's states, divided; vLLM is one engine of both ranks (tensor parallel 2). The command `rlflow fit` is
started as a user would; what all its processes hold together is read every half second (`Pss`, so that what they share
counts once). The largest sum, and the run's metrics, stand in the last line, which is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from rlflow.models.tiny import tiny_tokenizer

GIB = 2**30
WANTED_GIB = 20.0
STEPS = 2
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "3b": {
        "model_type": "qwen2",
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
}
STRATEGIES = {
    "zero3": {
        "class_path": "rlflow.strategies.DeepSpeedStrategy",
        "init_args": {"stage": 3, "precision": "bf16", "token_budget": 256},
    },
    "fsdp": {
        "class_path": "rlflow.strategies.FSDPStrategy",
        "init_args": {"precision": "bf16", "token_budget": 256},
    },
}


def main() -> None:
    """Write the model and the config, run it, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=list(SHAPES))
    parser.add_argument("--strategy", choices=list(STRATEGIES), default="fsdp")
    parser.add_argument("--folder", type=Path, help="kept afterwards; a temporary one without it")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model = write_model(folder / given.size, SHAPES[given.size])
        config = folder / f"{given.size}-{given.strategy}.yaml"
        config.write_text(yaml.safe_dump(config_of(given.size, model, given.strategy, folder / "run")))
        began = time.monotonic()
        command = [sys.executable, "-m", "rlflow.cli", "fit", "--config", str(config)]
        with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as fit:
            peak = 0
            while fit.poll() is None:
                peak = max(peak, held_by_all(fit.pid))
                time.sleep(0.5)
        assert fit.returncode == 0, fit.returncode
        steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        steps = [step for step in steps if "reward/mean" in step]
        assert len(steps) == STEPS, len(steps)
        assert all(math.isfinite(value) for step in steps for value in step.values())
        found = {
            "benchmark": "large_runs",
            "model": given.size,
            "strategy": given.strategy,
            "file_gb": round(sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e9, 2),
            "peak_gib": round(peak / GIB, 1),
            "wanted_gib": WANTED_GIB,
            "seconds": round(time.monotonic() - began),
            "step_seconds": [round(step["time/step"], 1) for step in steps],
            "logprob_gap": max(step["sync/logprob_gap"] for step in steps),
            "grad_norm": [value for step in steps for name, value in step.items() if name.endswith("/grad_norm")],
        }
    print(json.dumps(found))


def config_of(size: str, model: Path, strategy: str, run: Path) -> dict[str, Any]:
    """GRPO on sums, responses of up to 16 tokens."""
    actor: dict[str, Any] = {"model": str(model), "optimizer": {"lr": 1e-5}, "gradient_checkpointing": True}
    module: dict[str, Any] = {
        "actor": actor,
        "group_size": 4,
        "max_response_length": 16,
        "reward": {
            "class_path": "rlflow.rewards.CallableReward",
            "init_args": {"function": "benchmarks.large_runs.sevens"},
        },
    }
    if size == "3b":
        actor["lora"] = {"rank": 8}
    return {
        "seed": 0,
        "module": {"class_path": "rlflow.algorithms.GRPO", "init_args": module},
        "data": {
            "train": {
                "class_path": "rlflow.data.ReasoningGym",
                "init_args": {"task": "chain_sum", "size": 256, "validation_size": 16, "seed": 1},
            },
            "prompts_per_step": 4,
            "prompt": "question",
        },
        "trainer": {"run_dir": str(run), "devices": 2, "accelerator": "cpu", "max_steps": STEPS},
        "strategy": STRATEGIES[strategy],
        "rollout": {
            "class_path": "rlflow.rollout.VLLMEngine",
            "init_args": {"tensor_parallel_size": 2, "kv_cache_gib": 0.125, "max_model_len": 256, "max_num_seqs": 16},
        },
    }


def sevens(response: str, row: dict[str, Any]) -> float:
    """The reward: how many sevens a response has; a random model's responses differ in that."""
    return float(response.count("7"))


def tokenizer_of(vocabulary: int) -> Any:
    """The embedded model's, with a word of its own for each further token."""
    tokenizer: Any = tiny_tokenizer()
    tokenizer.add_tokens([f"w{number}" for number in range(len(tokenizer), vocabulary)])
    return tokenizer


def write_model(folder: Path, shape: dict[str, Any]) -> Path:
    """A model of random weights in bfloat16, in files of 500 MB, drawn tensor by tensor; kept if it is there."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True)
    tokenizer = tokenizer_of(shape["vocab_size"])
    config = AutoConfig.for_model(
        **shape,
        architectures=[{"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}[shape["model_type"]]],
        dtype=torch.bfloat16,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    index: dict[str, str] = {}
    share: dict[str, torch.Tensor] = {}
    files = 0

    def flush() -> None:
        nonlocal share, files
        name = f"model-{files:05d}.safetensors"
        save_file(share, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(share, name))
        share, files = {}, files + 1

    for name, parameter in model.named_parameters():
        if "norm" in name:
            share[name] = torch.ones(parameter.shape, dtype=torch.bfloat16)
        elif name.endswith("bias"):
            share[name] = torch.zeros(parameter.shape, dtype=torch.bfloat16)
        else:
            share[name] = (0.02 * torch.randn(parameter.shape, generator=generator)).bfloat16()
        if sum(tensor.nbytes for tensor in share.values()) > 500e6:
            flush()
    flush()
    size = sum((folder / name).stat().st_size for name in {*index.values()})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    )
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    return folder


def held_by_all(process: int) -> int:
    """Bytes that a process and its descendants hold together."""
    total = 0
    try:
        family = [psutil.Process(process), *psutil.Process(process).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for member in family:
        try:
            total += member.memory_full_info().pss
        except psutil.Error:
            continue
    return total


if __name__ == "__main__":
    main()
