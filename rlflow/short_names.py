"""Short names of rlflow's own classes, in configs, options and Python; and classes by name or dotted path."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from rlflow.dotted_path import object_at
from rlflow.errors import UserError, did_you_mean, one_line

# Short names by kind, and the paths of their classes. A class's own name, such as `VLLMEngine`, stands for it as well.
SHORT_NAMES: dict[str, dict[str, str]] = {
    "module": {
        "cispo": "rlflow.algorithms.CISPO",
        "cpgd": "rlflow.algorithms.CPGD",
        "dapo": "rlflow.algorithms.DAPO",
        "dpo": "rlflow.algorithms.DPO",
        "dppo": "rlflow.algorithms.DPPO",
        "dr_grpo": "rlflow.algorithms.DrGRPO",
        "gail": "rlflow.algorithms.GAIL",
        "gdpo": "rlflow.algorithms.GDPO",
        "gmpo": "rlflow.algorithms.GMPO",
        "gpg": "rlflow.algorithms.GPG",
        "grpo": "rlflow.algorithms.GRPO",
        "gspo": "rlflow.algorithms.GSPO",
        "kto": "rlflow.algorithms.KTO",
        "maxrl": "rlflow.algorithms.MaxRL",
        "off_policy_sequence_masking": "rlflow.algorithms.OffPolicySequenceMasking",
        "on_policy_distillation": "rlflow.algorithms.OnPolicyDistillation",
        "opo": "rlflow.algorithms.OPO",
        "ppo": "rlflow.algorithms.PPO",
        "raft": "rlflow.algorithms.RAFT",
        "reinforce": "rlflow.algorithms.REINFORCE",
        "reinforce_plus_plus": "rlflow.algorithms.REINFORCEPlusPlus",
        "reinforce_plus_plus_baseline": "rlflow.algorithms.REINFORCEPlusPlusBaseline",
        "remax": "rlflow.algorithms.ReMax",
        "reward_model_training": "rlflow.algorithms.RewardModelTraining",
        "rloo": "rlflow.algorithms.RLOO",
        "sapo": "rlflow.algorithms.SAPO",
        "score_centering": "rlflow.algorithms.ScoreCentering",
        "self_distillation": "rlflow.algorithms.SelfDistillation",
        "self_play": "rlflow.algorithms.SelfPlay",
        "sft": "rlflow.algorithms.SFT",
        "simpo": "rlflow.algorithms.SimPO",
        "tree_rl": "rlflow.algorithms.TreeRL",
        "workflow": "rlflow.workflow.Workflow",
    },
    "model": {
        "causal_lm": "rlflow.CausalLM",
        "reward_model": "rlflow.RewardModel",
        "value_model": "rlflow.ValueModel",
    },
    "environment": {"environment": "rlflow.Environment", "harness": "rlflow.Harness"},
    "reward": {
        "by_dataset": "rlflow.rewards.ByDataset",
        "callable_reward": "rlflow.rewards.CallableReward",
        "code_tests": "rlflow.rewards.CodeTests",
        "exact_match": "rlflow.rewards.ExactMatch",
        "http": "rlflow.rewards.HTTPReward",
        "judge": "rlflow.rewards.Judge",
        "math_verify": "rlflow.rewards.MathVerify",
        "reasoning_gym": "rlflow.rewards.ReasoningGymScore",
        "rubric": "rlflow.rewards.Rubric",
        "sum_value": "rlflow.rewards.SumValue",
        "weighted_sum": "rlflow.rewards.WeightedSum",
    },
    "data": {
        "hugging_face": "rlflow.data.HuggingFace",
        "jsonl": "rlflow.data.JSONL",
        "mixture": "rlflow.data.Mixture",
        "parquet": "rlflow.data.Parquet",
        "scripted_conversations": "rlflow.data.ScriptedConversations",
        "random_rows": "rlflow.data.RandomRows",
        "reasoning_gym": "rlflow.data.ReasoningGym",
        "reasoning_gym_hints": "rlflow.data.ReasoningGymHints",
        "reasoning_gym_pairs": "rlflow.data.ReasoningGymPairs",
    },
    "rollout": {
        "transformers": "rlflow.rollout.TransformersEngine",
        "vllm": "rlflow.rollout.VLLMEngine",
    },
    "strategy": {
        "deepspeed": "rlflow.strategies.DeepSpeedStrategy",
        "fsdp": "rlflow.strategies.FSDPStrategy",
        "single": "rlflow.strategies.SingleProcess",
    },
    "logger": {
        "csv": "rlflow.loggers.CSVLogger",
        "jsonl": "rlflow.loggers.JSONLLogger",
        "mlflow": "lightning.pytorch.loggers.MLFlowLogger",
        "tensorboard": "rlflow.loggers.TensorBoardLogger",
        "wandb": "rlflow.loggers.WandbLogger",
    },
    "callback": {
        "early_stopping": "rlflow.callbacks.EarlyStopping",
        "learning_rate_monitor": "rlflow.callbacks.LearningRateMonitor",
        "model_checkpoint": "rlflow.callbacks.ModelCheckpoint",
        "sample_table": "rlflow.callbacks.SampleTable",
        "throughput_monitor": "rlflow.callbacks.ThroughputMonitor",
        "timer": "rlflow.callbacks.Timer",
    },
}


def made(value: Any, setting: str, *bases: type) -> Any:
    """The object of a short name, with the defaults of its class; other values are unchanged.

    Args:
        value: A short name, a dotted path of a class, or an object.
        setting: The setting that the value was given for.
        bases: Classes; the object has to be an instance of one of them.

    Raises:
        UserError: There is no such class, it has no defaults for all that it takes, or its library is missing.
    """
    if value is None or isinstance(value, bases):
        return value
    if not isinstance(value, str):
        kinds = " or ".join(base.__name__ for base in bases)
        raise UserError(f"`{setting}` is {value!r:.60}; give a {kinds}, or the name of its class")
    try:
        cls = class_named(value, bases)
    except UserError as error:
        raise UserError(f"`{setting}` {error}") from error
    required = [
        f"`{each.name}`"
        for each in inspect.signature(cls).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if required:
        raise UserError(f"`{setting}` is {value!r}, and {cls.__name__} needs {', '.join(required)}; give the object")
    try:
        return cls()
    except ImportError as error:
        raise lacks_library(setting, cls, error) from error


def lacks_library(setting: str, cls: type, error: ImportError) -> UserError:
    """The text for a setting whose class cannot be made because a library is missing."""
    return UserError(f"`{setting}` names {cls.__name__}, whose library is missing: {one_line(error)}")


def class_named(name: str, bases: Sequence[type]) -> type:
    """The class of a short name, or at a dotted path.

    Args:
        name: Name as a user wrote it.
        bases: Classes; it has to be one of them, or a subclass of one.

    Raises:
        UserError: There is none, it cannot be imported, or it is none of `bases`. The message continues after the key.
    """
    path = path_of(name, bases)
    if "." not in path or not all(part.isidentifier() for part in path.split(".")):
        hint = did_you_mean(name, names_of(bases)) or f" Write module.Class{such_as(name, bases)}"
        raise UserError(f"is {name!r:.80}, and no class is known by that name.{hint}")
    rooms = {path.rpartition(".")[0] for _, path in _paths()}
    found = object_at(path, f"names the class {name}", rooms)
    if not inspect.isclass(found) or not issubclass(found, tuple(bases)):
        kinds = " or ".join(dict.fromkeys(base.__name__ for base in bases))
        raise UserError(
            f"names the class {name}, which is not a subclass of {kinds}; name one that is{such_as(name, bases)}"
        )
    cls: type = found
    return cls


def path_of(name: str, bases: Sequence[type]) -> str:
    """The dotted path of a short name or class name among subclasses of these classes; other names are unchanged."""
    paths = (path for short, path in _paths() if name in (short, path.rpartition(".")[2]))
    return next((path for path in paths if issubclass(object_at(path, name), tuple(bases))), name)


def names_of(bases: Sequence[type]) -> list[str]:
    """The short names and the class names of rlflow's subclasses of these classes."""
    found = [(short, path) for short, path in _paths() if issubclass(object_at(path, short), tuple(bases))]
    return [each for short, path in found for each in (short, path.rpartition(".")[2])]


def such_as(name: str, bases: Sequence[type]) -> str:
    """`, such as NAME` with the nearest short name of a subclass of these; empty if none is near."""
    nearest = get_close_matches(name.rpartition(".")[2].lower(), names_of(bases), 1, 0.0)
    return f", such as {nearest[0]}" if nearest else ""


def _paths() -> Iterator[tuple[str, str]]:
    for named in SHORT_NAMES.values():
        yield from named.items()
