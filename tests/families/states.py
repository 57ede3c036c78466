"""Models whose layers carry a state from token to token, with weights by which states reach far.

Tokens differ by a nat. The reference is transformers' own forward of one row at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlflow.models.tiny import tiny_tokenizer
from rlflow.models.weights import stored_buffers
from rlflow.rollout import Completion
from tests.families.models import STATEFUL, configuration

CONTEXT = 512
STATES = (
    *STATEFUL,
    "glm4_moe",
    "deepseek_v3",
)  # two of another kind: a bias that is not a parameter chooses their experts


def write_model(name: str, folder: Path, seed: int = 0, **settings: Any) -> Path:
    """Write the family's model with random weights, and a tokenizer, in Hugging Face form; return the folder."""
    config = configuration(name)
    for key, value in {"max_position_embeddings": CONTEXT, **settings}.items():
        setattr(config, key, value)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config)
    draw(model, seed)
    model.save_pretrained(folder)
    tiny_tokenizer(CONTEXT).save_pretrained(folder)
    return folder


@torch.no_grad()
def draw(model: nn.Module, seed: int) -> None:
    """Draw every weight of a model, and the bias of routers, which is a buffer."""
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    for name, weight in weights(model):
        noise = torch.randn(weight.shape, generator=generator)
        if "conv" in name and weight.dim() == 3:
            weight.copy_(0.4 * noise)
        elif "embed" in name and weight.dim() > 1:
            weight.copy_((0.03 if tied else 0.5) * noise)
        elif name == "lm_head.weight":
            weight.copy_(0.15 * noise)
        elif weight.dim() > 1:
            weight.copy_(0.6 * noise / weight.shape[-1] ** 0.5)
        elif name.endswith("A_log"):
            weight.copy_(1.5 * torch.rand(weight.shape, generator=generator) - 0.5)
        elif name.endswith("dt_bias"):
            weight.copy_(0.5 * noise - 1)
        else:  # norms, whose weight is 1 or added to 1, and biases
            weight.copy_(weight + 0.1 * noise)


def reference(folder: Path) -> Any:
    """Transformers' model in `folder`, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def weights(model: Any) -> list[tuple[str, Tensor]]:
    """The tensors that a sync sends: parameters, and the buffers of files, which are the biases of routers."""
    return [*model.named_parameters(), *stored_buffers(model)]


@torch.no_grad()
def change(model: Any, seed: int, scale: float = 0.02) -> None:
    """Change every tensor that a sync sends."""
    generator = torch.Generator().manual_seed(seed)
    for _, weight in weights(model):
        weight += scale * torch.randn(weight.shape, generator=generator)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 128, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def gaps(model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> list[float]:
    """For each row, the largest difference between the engine's logprobs and those of `model` reading it alone."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]  # at t they score token t + 1
        scored = torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        found.append(float((scored - torch.tensor(completion.logprobs)).abs().max()))
    return found
