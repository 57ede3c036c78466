"""TRL's `GRPOTrainer`, or a subclass of it, as functions: the trainer as it is, on a batch that is given."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import UserError, one_line
from rlflow.models.tiny import write_tiny_model

EPSILON_HIGH, LONGEST = 0.28, 16  # where no setting says otherwise


def is_trainer(found: Any) -> bool:
    """Whether it is TRL's `GRPOTrainer` or a subclass of it."""
    return inspect.isclass(found) and any(
        each.__name__ == "GRPOTrainer" and each.__module__.startswith("trl.") for each in found.__mro__
    )


def loss_settings(settings: Mapping[str, Any]) -> dict[str, float]:
    """The reference's numbers by settings of `GRPOConfig`, with TRL's defaults, but two different clip ranges."""
    of = {"epsilon": 0.2, "epsilon_high": EPSILON_HIGH, "beta": 0.0, "max_completion_length": LONGEST, **settings}
    names = {
        "epsilon": "clip_low",
        "epsilon_high": "clip_high",
        "beta": "kl_coef",
        "max_completion_length": "max_length",
    }
    return {name: of[key] for key, name in names.items()}


def trainer_loss(trainer: type, settings: Mapping[str, Any], scratch: Path) -> Callable[..., Tensor]:
    """The trainer's `_compute_loss`, of logprobs that are given in place of its model's.

    Micro-batches are those of gradient accumulation; ranks are calls as if on that many processes, whose gradients
    data parallelism averages.

    Args:
        trainer: `GRPOTrainer` or a subclass.
        settings: Settings of `GRPOConfig`.
        scratch: Folder for a small model and the trainer's output.
    """
    with_reference = settings.get("beta", 0.0) != 0.0
    made = _made(trainer, {"epsilon_high": EPSILON_HIGH, **settings}, scratch)

    def loss(
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        total_tokens: Tensor,
        world_size: int,
        parts: Sequence[Tensor],
        ref_logprobs: Tensor | None = None,
    ) -> Tensor:
        made.model.train()
        made.current_gradient_accumulation_steps = made.args.steps_per_generation = len(parts)
        made.accelerator = _Processes(made.accelerator, world_size)
        total = logprobs.new_zeros(())
        for rows in parts:
            shown = logprobs[rows]
            made._get_per_token_logps_and_entropies = lambda *_, shown=shown, **__: (
                shown,
                torch.zeros_like(shown),
                None,
            )
            written = mask[rows].flip(1).cumsum(1).flip(1) > 0  # up to the last token that counts
            inputs = {
                "prompt_ids": torch.ones(len(rows), 1, dtype=torch.int64),
                "prompt_mask": torch.ones(len(rows), 1, dtype=torch.int64),
                "completion_ids": torch.ones_like(written, dtype=torch.int64),
                "completion_mask": written.long(),
                "tool_mask": mask[rows].long(),
                "advantages": advantages[rows],
                "old_per_token_logps": old_logprobs[rows],
                "num_items_in_batch": total_tokens,
            }
            if ref_logprobs is not None:
                inputs["ref_per_token_logps"] = ref_logprobs[rows]
            total = total + made._compute_loss(made.model, inputs)
        return total

    if not with_reference:
        return _without(loss, "ref_logprobs")
    return loss


def trainer_advantages(trainer: type, settings: Mapping[str, Any], scratch: Path) -> Callable[..., Tensor]:
    """The advantages that the trainer computes of rewards that are given, for responses of one token each.

    Args:
        trainer: `GRPOTrainer` or a subclass.
        settings: Settings of `GRPOConfig`.
        scratch: Folder for a small model and the trainer's output.
    """
    made = _made(trainer, settings, scratch)
    held: dict[str, Any] = {}

    def sampled(prompts: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        return [[5] for _ in prompts], None

    def score(completions: Any, **_: Any) -> list[float]:
        return [float(x) for x in held["rewards"]]

    made._generate_single_turn = sampled
    made.reward_funcs = [score]

    def advantages(rewards: Tensor, group_size: int) -> Tensor:
        held["rewards"] = rewards
        made.num_generations = group_size
        made.model.train()
        prompts = [{"prompt": f"{number // group_size}+1="} for number in range(len(rewards))]
        found: Tensor = made._generate_and_score_completions(prompts)["advantages"]
        return found

    return advantages


def _made(trainer: type, settings: Mapping[str, Any], scratch: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from transformers import AutoTokenizer
        from trl import GRPOConfig

        model = write_tiny_model(scratch / "model", hidden_size=32, layers=1)
        own = {
            "output_dir": str(scratch / "trl"),
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "disable_tqdm": True,
        }
        own |= {"per_device_train_batch_size": 4, "num_generations": 2, "gradient_checkpointing": False}
        known = inspect.signature(GRPOConfig).parameters
        for name in settings:
            if name not in known:
                raise UserError(f"--settings has {name}, which GRPOConfig does not know; look in TRL's documentation")
        rows = Dataset.from_list([{"prompt": "1+1="}] * 4)
        try:
            arguments = GRPOConfig(**{**own, "max_completion_length": LONGEST, **settings})
            made = trainer(
                str(model),
                reward_funcs=_no_reward,
                args=arguments,
                train_dataset=rows,
                processing_class=AutoTokenizer.from_pretrained(model, trust_remote_code=False),
            )
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{trainer.__name__} cannot be made with these `--settings` ({one_line(error)}); correct them"
            ) from error
    return made


def _no_reward(completions: Any, **_: Any) -> list[float]:
    return [0.0 for _ in completions]


class _Processes:
    """An accelerator that reports this number of processes; all else is that of one process."""

    def __init__(self, accelerator: Any, number: int) -> None:
        self._one: Any = accelerator._one if isinstance(accelerator, _Processes) else accelerator
        self.num_processes = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._one, name)


def _without(function: Callable[..., Tensor], parameter: str) -> Callable[..., Tensor]:
    """The function without a parameter that has a default."""
    signature = inspect.signature(function)

    def without(**arguments: Any) -> Tensor:
        return function(**arguments)

    kept = [each for each in signature.parameters.values() if each.name != parameter]
    without.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return without
