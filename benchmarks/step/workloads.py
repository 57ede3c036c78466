"""The workloads W1 to W4: model, prompts, responses and algorithm."""

from __future__ import annotations

import json
import random
import string
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from rlflow import LoRA
from rlflow.models.tiny import write_tiny_model

RANKS = 2  # of one thread each
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Qwen2 with 128 tokens in its vocabulary; names as in `write_tiny_model`."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int


SMALL = Sizes(hidden_size=256, intermediate_size=768, layers=4, heads=4, kv_heads=2)  # 3.2 million weights
LARGER = Sizes(hidden_size=512, intermediate_size=1664, layers=6, heads=8, kv_heads=4)  # 20.1 million


@dataclass(frozen=True)
class Workload:
    """The training of a step.

    A response of random weights ends at each token with a probability of 1 / 128, so lengths have a long tail.

    Attributes:
        name: Name of the workload.
        sizes: Sizes of the model.
        precision: Precision of weights and forward passes.
        prompts: Number of prompts of a step.
        prompt_tokens: Tokens of a prompt, the fewest and the most; None for sums such as `17+4=`.
        group: Responses to a prompt.
        longest: Tokens of a response at most.
        algorithm: Algorithm that trains.
        kl_coef: Weight of the divergence from a reference; 0 for no reference.
        updates: Number of updates of a step; of more than one the logprobs before the first are a pass of their own.
        lora: Settings of adapters; None to train all weights.
        trl: Whether TRL can do it.
    """

    name: str
    sizes: Sizes
    precision: Literal["fp32", "bf16"]
    prompts: int
    prompt_tokens: tuple[int, int] | None
    group: int
    longest: int
    algorithm: Literal["grpo", "ppo"] = "grpo"
    kl_coef: float = 0.0
    updates: int = 1
    lora: LoRA | None = None
    trl: bool = True

    @property
    def rows(self) -> int:
        """Responses of a step."""
        return self.prompts * self.group

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and forward passes."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def write(self, folder: Path, steps: int) -> None:
        """Write the model and the prompts of so many steps."""
        write_tiny_model(folder / "model", dtype=self.dtype, seed=0, **vars(self.sizes))
        self.write_prompts(folder / "prompts.jsonl", self.prompts * steps)

    def write_prompts(self, file: Path, count: int) -> None:
        """Write so many rows with a `prompt`."""
        numbers = random.Random(0)
        prompts = [self._prompt(numbers) for _ in range(count)]
        file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))

    def _prompt(self, numbers: random.Random) -> str:
        if self.prompt_tokens is None:
            return f"{numbers.randrange(100)}+{numbers.randrange(100)}="
        letters = string.ascii_lowercase + " "
        return "".join(numbers.choices(letters, k=numbers.randint(*self.prompt_tokens)))  # a token is a character


W1 = Workload("W1", SMALL, "fp32", prompts=32, prompt_tokens=None, group=8, longest=256)
W2 = Workload("W2", LARGER, "bf16", prompts=8, prompt_tokens=(64, 256), group=8, longest=192, kl_coef=0.04)
W3 = Workload(
    "W3", SMALL, "fp32", prompts=32, prompt_tokens=None, group=4, longest=512, algorithm="ppo", updates=4, trl=False
)
W4 = replace(W2, name="W4", kl_coef=0.0, lora=LoRA(rank=16, alpha=32.0))
WORKLOADS = {workload.name: workload for workload in (W1, W2, W3, W4)}


def share_of_digits(text: str) -> float:
    """A reward that differs between random responses, so that there is something to learn."""
    return sum(letter.isdigit() for letter in text) / max(1, len(text))
