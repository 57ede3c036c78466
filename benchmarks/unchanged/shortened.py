"""A revision's own config, made short: three steps of few prompts, on this machine's CPU.

Keys are found at any depth, so a revision may write them in another place than the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.unchanged.cases import Case, for_gpus
from rlflow.short_names import SHORT_NAMES

STEPS = 3
LONGEST, CUT_TO = 64, 32  # tokens of a response; chains have 64, and are right as a whole
DEEPSPEED, FSDP = "rlflow.strategies.DeepSpeedStrategy", "rlflow.strategies.FSDPStrategy"
WITH_FSDP = ("learn/grpo_kl", "learn/ppo_kl")  # at 2 ranks; other configs of one process take DeepSpeed there
OF_ONE_PROCESS = (None, "rlflow.strategies.SingleProcess")
PROBLEMS = {"class_path": "rlflow.data.JSONL", "init_args": {"path": "runs/word_problems/problems.jsonl"}}
FOR_LENGTH = {
    "class_path": "rlflow.rewards.CallableReward",
    "init_args": {"function": "benchmarks.word_problems.length"},
}


def shortened(settings: Any, case: Case, folder: Path, names: Mapping[str, str] = MappingProxyType({})) -> Any:
    """The settings of a run that a proof makes.

    Args:
        settings: A config, as read.
        case: Case of the run.
        folder: Folder for its results.
        names: New names of keys and classes, by the old ones that stand here.
    """
    short = deepcopy(settings)
    if for_gpus(short):
        _for_a_cpu(short, names)
    trainer = short["trainer"]
    for key in ("max_epochs", "num_nodes"):
        trainer.pop(key, None)
    trainer |= {"max_steps": STEPS, "limit_val_batches": 1, "run_dir": str(folder)}
    trainer |= {"devices": case.ranks, "accelerator": "cpu"}
    short["data"]["prompts_per_step"] //= case.divisor
    change(short, names.get("samples_per_update", "samples_per_update"), lambda samples: samples // case.divisor)
    for key in ("actor_start_step", "start_step"):
        change(
            short, names.get(key, key), lambda steps: min(steps, 1)
        )  # PPO's actor would not train within three steps
    for key in ("max_response_length", "max_new_tokens"):
        change(short, names.get(key, key), lambda tokens: tokens if tokens <= LONGEST else CUT_TO)
    if "rollout" in short and class_of(short["rollout"]) != case.engine:
        short["rollout"] = {"class_path": names.get(case.engine, case.engine)}
    if case.ranks > 1 and class_of(short.get("strategy")) in OF_ONE_PROCESS:
        fsdp = {"class_path": names.get(FSDP, FSDP)}
        zero = {"class_path": names.get(DEEPSPEED, DEEPSPEED), "init_args": {"stage": 2}}
        short["strategy"] = fsdp if case.config in WITH_FSDP else zero
    return short


def class_of(section: Any) -> Any:
    """The path of the class that a section of a config names."""
    named = section.get("class_path") if isinstance(section, dict) else section
    return (SHORT_NAMES["rollout"] | SHORT_NAMES["strategy"]).get(named, named)


def change(tree: Any, key: str, new: Any) -> None:
    """Put `new(value)` where any value, but None, has this key."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key and value is not None:
                tree[name] = new(value)
            else:
                change(value, key, new)
    elif isinstance(tree, list):
        for value in tree:
            change(value, key, new)


def _for_a_cpu(short: Any, names: Mapping[str, str]) -> None:
    short.pop("logger", None)  # it needs a network
    change(short, "model", lambda model: "tiny" if isinstance(model, str) else model)
    change(short, "reward", lambda _: _named(FOR_LENGTH, names))
    short["data"] |= {"train": _named(PROBLEMS, names), "validation": _named(PROBLEMS, names), "prompt": "question"}


def _named(part: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    path = part["class_path"]
    return {"class_path": names.get(path, path), "init_args": dict(part["init_args"])}
