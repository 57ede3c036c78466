"""The inputs of both libraries: the same weights, the same prompts and responses, the same rewards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlflow.models.tiny import write_tiny_model

GROUP, LONGEST, TEMPERATURE = 3, 12, 0.8
PROMPTS = ("1+1=", "12+34=", "7*8=", "5-5=")
# Token ids are ASCII codes and 0 ends a response; those without it were cut.
RESPONSES = (
    *("2\0", "11 or 2\0", "3"),
    *("46\0", "so it is 46\0", "1 1 1 1 1 1 "),
    *("56\0", "1\0", "78 is 1 1\0"),
    *("0\0", "4\0", "no idea\0"),  # of equal rewards
)

LABELS = tuple(place % 3 == 0 for place in range(len(RESPONSES)))  # whether a response is good


@dataclass(frozen=True)
class Models:
    """Folders of one architecture with different weights: the policy in training, what it was when the step began,
    the policy that sampled, and the reference."""

    policy: Path
    old: Path
    sampler: Path
    reference: Path


def write_models(folder: Path) -> Models:
    """The four models; a ratio between two of the first three is mostly within 0.5 and 2, and often beyond a clip."""
    old = write_tiny_model(folder / "old", hidden_size=32, intermediate_size=64)
    weights = load_file(old / "model.safetensors")
    weights = {name: tensor if "norm" in name else 10 * tensor for name, tensor in weights.items()}
    save_file(weights, old / "model.safetensors", metadata={"format": "pt"})
    return Models(
        policy=_near(old, folder / "policy", 0.02, seed=1),
        old=old,
        sampler=_near(old, folder / "sampler", 0.03, seed=2),
        reference=_near(old, folder / "reference", 0.05, seed=3),
    )


def write_reward_model(source: Path, folder: Path) -> Path:
    """A model with the weights of a language model and a head of random ones."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(4)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def _near(source: Path, folder: Path, distance: float, seed: int) -> Path:
    """A copy of a model with every weight moved by a random amount of that standard deviation."""
    write_tiny_model(folder, hidden_size=32, intermediate_size=64)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(source / "model.safetensors")
    moved = {
        name: tensor + distance * torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()
    }
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prompt_ids() -> list[list[int]]:
    """Prompt ids of each sample."""
    return [list(prompt.encode()) for prompt in PROMPTS for _ in range(GROUP)]


def response_ids() -> list[list[int]]:
    """Response ids of each sample."""
    return [list(response.encode()) for response in RESPONSES]


def pairs() -> list[tuple[list[int], list[int], list[int]]]:
    """Prompt, chosen and rejected response: the first two of each prompt's."""
    prompts, responses = prompt_ids(), response_ids()
    return [(prompts[i], responses[i], responses[i + 1]) for i in range(0, len(responses), GROUP)]


def points(text: str) -> float:
    """The reward of a response: 10,000 for each 1.

    It is so large that the 1e-4 of TRL and the 1e-6 here, added to a group's standard deviation, do not matter.
    """
    return 1e4 * text.count("1")


@dataclass(frozen=True)
class Result:
    """The results of a library for a step, by Hugging Face name.

    Attributes:
        loss: Loss of the whole batch.
        gradient: Gradient of the loss.
        advantages: `[B]`, where there are any.
    """

    loss: float
    gradient: dict[str, Tensor]
    advantages: Tensor | None = None


TOLERANCE = 2e-6  # relative: TRL computes logprobs in float32, with 6e-8, also where the model is in float64


def gradient_distance(ours: Result, theirs: Result) -> float:
    """`|g - h| / |h|` over all weights; tied weights stand in it once."""
    assert ours.gradient.keys() == theirs.gradient.keys()
    difference = torch.stack([(ours.gradient[name] - h).norm() for name, h in theirs.gradient.items()]).norm()
    return float(difference / torch.stack([h.norm() for h in theirs.gradient.values()]).norm())
