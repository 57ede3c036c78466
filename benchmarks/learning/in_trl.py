"""GRPO on chains in TRL, by a config of rlflow: the same model, rows, settings and number of updates.

    python -m benchmarks.learning.in_trl --config configs/learn/grpo_kl.yaml --seed 0 --trainer.run_dir runs/trl

Responses are those of transformers' `generate`. What is written is `metrics.jsonl`, by step and under rlflow's names;
TRL logs each update, and a step is the mean of its updates.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.learning.chains import Chains

# Divided by the tokens of the update's own samples; `dapo` divides by those of the step's, by their mean over updates.
LOSS_TYPES = {"token-mean": "bnpo"}
METRICS = {
    "reward": "reward/mean",
    "entropy": "actor/entropy",
    "kl": "actor/kl",
    "clip_ratio/region_mean": "actor/clip_fraction",
    "completions/mean_length": "rollout/length",
    "grad_norm": "actor/grad_norm",
}


def main() -> None:
    """Train, and write the metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--trainer.run_dir", dest="folder", type=Path, required=True)
    given = parser.parse_args()
    config = yaml.safe_load(given.config.read_text(encoding="utf-8"))
    given.folder.mkdir(parents=True)
    logged = train(config, given.seed, given.folder)
    lines = [json.dumps(record) for record in by_step(logged, updates_a_step(config))]
    (given.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def train(config: Mapping[str, Any], seed: int, folder: Path) -> list[dict[str, float]]:
    """Train in TRL; returns the logs of each update, and of the validation after the last."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=config["module"]["init_args"]["model"],
        reward_funcs=exact_match,
        args=GRPOConfig(**settings(config), seed=seed, output_dir=str(folder / "trl")),
        train_dataset=Dataset.from_list(rows(config["data"]["train"])),
        eval_dataset=Dataset.from_list(rows(config["data"]["validation"])),
    )
    trainer.train()
    trainer.evaluate()
    return trainer.state.log_history


def rows(source: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a config's dataset."""
    chains = Chains(**source.get("init_args", {}))
    return [chains[row] for row in range(len(chains))]


def exact_match(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """The reward."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `GRPOConfig` that are not its defaults."""
    module = config["module"]["init_args"]
    actor = module["actor"]
    optimizer = actor["optimizer"]
    return {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "per_device_train_batch_size": actor["samples_per_update"],
        "steps_per_generation": updates_an_epoch(config),
        "num_iterations": actor["epochs"],
        "max_steps": config["trainer"]["max_steps"] * updates_a_step(config),
        "num_generations": module["group_size"],
        "num_generations_eval": config["trainer"]["val_samples"],
        "per_device_eval_batch_size": 30 * config["trainer"]["val_samples"],
        "max_completion_length": module["max_response_length"],
        "temperature": actor["temperature"],
        "epsilon": module["clip"]["low"],
        "epsilon_high": module["clip"]["high"],
        "beta": module["kl"]["coef"],
        "use_bias_correction_kl": module["kl"]["kind"] == "k3-ratio",
        "loss_type": LOSS_TYPES[module["loss_aggregation"]],
        "scale_rewards": "group" if module["normalize_std"] else "none",
        "learning_rate": optimizer["lr"],
        "adam_beta1": optimizer["betas"][0],
        "adam_beta2": optimizer["betas"][1],
        "weight_decay": optimizer["weight_decay"],
        "warmup_steps": optimizer["warmup_steps"],
        "lr_scheduler_type": optimizer["schedule"],
        "max_grad_norm": optimizer["gradient_clipping"],
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def updates_an_epoch(config: Mapping[str, Any]) -> int:
    """Mini-batches of a step's samples."""
    module = config["module"]["init_args"]
    return int(config["data"]["prompts_per_step"] * module["group_size"] // module["actor"]["samples_per_update"])


def updates_a_step(config: Mapping[str, Any]) -> int:
    """Mini-batches of all epochs."""
    return updates_an_epoch(config) * int(config["module"]["init_args"]["actor"]["epochs"])


def by_step(logged: Sequence[Mapping[str, float]], updates: int) -> list[dict[str, float]]:
    """The means of each step's updates, under rlflow's names, steps from 1 on; the validation in the last."""
    of_updates = [entry for entry in logged if "loss" in entry]
    steps = [of_updates[start : start + updates] for start in range(0, len(of_updates), updates)]
    records = [{"step": float(number)} | means(step) for number, step in enumerate(steps, start=1)]
    for entry in logged:
        if "eval_reward" in entry:
            records[-1]["val/accuracy"] = entry["eval_reward"]
    return records


def means(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of the updates' logs; the first update of a step logs the metrics of its samples."""
    return {
        ours: statistics.mean(entry[theirs] for entry in updates if theirs in entry)
        for theirs, ours in METRICS.items()
        if any(theirs in entry for entry in updates)
    }


if __name__ == "__main__":
    main()
