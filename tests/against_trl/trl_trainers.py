"""TRL's side: its own trainers, whose sampling is replaced by the recorded responses."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
    from datasets import Dataset
    from trl import (
        DPOConfig,
        DPOTrainer,
        GRPOConfig,
        GRPOTrainer,
        KTOConfig,
        KTOTrainer,
        RewardConfig,
        RewardTrainer,
        RLOOConfig,
        RLOOTrainer,
        SFTConfig,
        SFTTrainer,
    )

from tests.against_trl.cases import (
    GROUP,
    LABELS,
    LONGEST,
    PROMPTS,
    TEMPERATURE,
    Models,
    Result,
    pairs,
    points,
    prompt_ids,
    response_ids,
)

SAMPLES = len(response_ids())
_SAMPLING = {"num_generations": GROUP, "max_completion_length": LONGEST, "temperature": TEMPERATURE}


def _score(completions: list[str], **_: Any) -> list[float]:
    return [points(text) for text in completions]


class RecordedGRPO(GRPOTrainer):
    """Samples the recorded responses; with `sampler` it takes them for vLLM's, with these logprobs."""

    sampler: list[list[float]] | None = None

    def _generate_single_turn(self, *_: Any, **__: Any) -> tuple[list[list[int]], list[list[float]] | None]:
        return response_ids(), self.sampler


class RecordedRLOO(RLOOTrainer):
    """Samples the recorded responses."""

    def _generate_single_turn(self, *_: Any, **__: Any) -> list[list[int]]:
        return response_ids()


def grpo(scratch: Path, models: Models, *, off_policy: bool, sampler: Tensor | None, **settings: Any) -> Result:
    """A step of `GRPOTrainer`: its advantages, old and reference logprobs, importance weights, loss and gradient.

    Args:
        scratch: Folder for the trainer's output.
        models: Models whose policy is trained, from `old` on.
        off_policy: Train `models.policy` on the samples of `models.old`; else train `models.old`.
        sampler: The rollout engine's logprobs `[B, T]`, which TRL knows of vLLM only; None is without.
        settings: Settings of `GRPOConfig`.
    """
    arguments = GRPOConfig(
        **_common(scratch),
        **_SAMPLING,
        num_iterations=2 if off_policy else 1,  # with 1, TRL leaves the old logprobs out
        **settings,
    )
    trainer = RecordedGRPO(
        _model(models.old), _score, args=arguments, train_dataset=_prompts(), processing_class=_tokenizer(models.old)
    )
    if sampler is not None:
        # TRL's vLLM cannot be had on a CPU; from here on it is only asked whether it was used
        trainer.use_vllm = True
        trainer.sampler = [row[: len(ids)].tolist() for row, ids in zip(sampler, response_ids(), strict=True)]
    return _step_of_samples(trainer, models, off_policy)


def rloo(scratch: Path, models: Models, *, off_policy: bool, **settings: Any) -> Result:
    """A step of `RLOOTrainer`; arguments as in `grpo`."""
    arguments = RLOOConfig(**_common(scratch), **_SAMPLING, num_iterations=2, **settings)
    trainer = RecordedRLOO(
        _model(models.old), _score, args=arguments, train_dataset=_prompts(), processing_class=_tokenizer(models.old)
    )
    return _step_of_samples(trainer, models, off_policy)


def reward_model(scratch: Path, folder: Path) -> Result:
    """The loss of `RewardTrainer` on the recorded pairs."""
    words = Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3"}])
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float64)
    trainer = RewardTrainer(
        model,
        RewardConfig(**_common(scratch), max_length=None),
        train_dataset=words,
        processing_class=_tokenizer(folder),
    )
    rows = [{"chosen_ids": prompt + won, "rejected_ids": prompt + lost} for prompt, won, lost in pairs()]
    return _differentiated(trainer, trainer.data_collator(rows))


def dpo(scratch: Path, models: Models, beta: float) -> Result:
    """The sigmoid loss of `DPOTrainer` on the recorded pairs."""
    words = Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3"}])
    trainer = DPOTrainer(
        _model(models.policy),
        _model(models.reference),
        DPOConfig(**_common(scratch), beta=beta, max_length=None),
        train_dataset=words,
        processing_class=_tokenizer(models.policy),
    )
    rows = [dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), pair, strict=True)) for pair in pairs()]
    return _differentiated(trainer, trainer.data_collator(rows))


def kto(scratch: Path, policy: Path, reference: Path, beta: float, weights: tuple[float, float]) -> Result:
    """The loss of `KTOTrainer` on the recorded responses, each prompt also with the response of the next row."""
    words = Dataset.from_list([{"prompt": "1", "completion": each, "label": each == "2"} for each in "23"])
    good, bad = weights
    trainer = KTOTrainer(
        _model(policy),
        _model(reference),
        KTOConfig(**_common(scratch), beta=beta, desirable_weight=good, undesirable_weight=bad, max_length=None),
        train_dataset=words,
        processing_class=_tokenizer(policy),
    )
    names, responses = ("prompt_ids", "completion_ids", "KL_completion_ids", "label"), response_ids()
    columns = (prompt_ids(), responses, [*responses[1:], responses[0]], LABELS)
    rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    return _differentiated(trainer, trainer.data_collator(rows))


def sft(scratch: Path, models: Models) -> Result:
    """The loss of `SFTTrainer` on the recorded responses."""
    words = Dataset.from_list([{"prompt": "1", "completion": "2"}])
    trainer = SFTTrainer(
        _model(models.policy),
        SFTConfig(**_common(scratch), max_length=None),
        train_dataset=words,
        processing_class=_tokenizer(models.policy),
    )
    rows = [
        {"input_ids": prompt + response, "labels": [-100] * len(prompt) + response}
        for prompt, response in zip(prompt_ids(), response_ids(), strict=True)
    ]
    return _differentiated(trainer, trainer.data_collator(rows))


def _common(scratch: Path) -> dict[str, Any]:
    return {
        "output_dir": str(scratch / "trl"),
        "per_device_train_batch_size": SAMPLES,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
    }


def _model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def _tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def _prompts() -> Dataset:
    return Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])


def _step_of_samples(trainer: GRPOTrainer | RLOOTrainer, models: Models, off_policy: bool) -> Result:
    if trainer.ref_model is not None:
        _load(trainer.ref_model, models.reference)
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in PROMPTS for _ in range(GROUP)])
    if off_policy:
        _load(trainer.model, models.policy)
    return _differentiated(trainer, inputs)


def _load(model: Any, folder: Path) -> None:
    unknown = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert unknown.missing_keys == ["lm_head.weight"]  # tied
    assert not unknown.unexpected_keys


def _differentiated(trainer: Any, inputs: dict[str, Any]) -> Result:
    trainer.current_gradient_accumulation_steps = 1  # as `Trainer.train` sets it
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradient = {name: weight.grad for name, weight in trainer.model.named_parameters()}
    return Result(loss.item(), gradient, inputs.get("advantages"))
