"""A model on the trainer's side: the weights to sync, and the forward that an engine's logprobs are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow.models.weights import stored_buffers
from rlflow.rollout import Completion, RankInfo, RolloutEngine
from rlflow.rollout.engine import in_dtype_held
from rlflow.rollout.vllm.weights import write

STOP = (0,)
PROMPTS = [[ord(character) for character in text] for text in ("1+2=", "12+34=", "7+8=", "a", "99+1=", "0+0=")]


def load(folder: Path) -> Any:
    """The model in `folder`, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def perturb(model: Any, seed: int, scale: float = 0.05) -> None:
    """Change every tensor."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)


def buckets(model: Any, size: int = 3, leave_out: str = "") -> Iterator[list[tuple[str, Tensor]]]:
    """The model's tensors, `size` at a time."""
    named = [each for each in (*model.named_parameters(), *stored_buffers(model)) if each[0] != leave_out]
    for start in range(0, len(named), size):
        yield named[start : start + size]


def setup(engine: RolloutEngine, folder: Path, dtype: torch.dtype = torch.float32) -> RolloutEngine:
    """Build `engine` on the CPU, in one process."""
    engine.setup(str(folder), RankInfo(dtype, torch.device("cpu")))
    return engine


def check_written(engine: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Assert that the pieces of these weights, written by `write`, are what vLLM's loader has left in the engine."""
    loaded = {piece.place: engine._parameter(piece.place) for piece in engine._pieces}
    written = {place: torch.full_like(held, torch.nan) for place, held in loaded.items()}
    write(((name, in_dtype_held(name, of, engine._dtype)) for name, of in weights), engine._pieces, written.__getitem__)
    for place, held in loaded.items():
        assert torch.equal(written[place], held), place


@torch.no_grad()
def logprob_gap(
    model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], temperature: float = 1.0
) -> float:
    """The largest difference between the engine's logprobs and those of the training forward, over all tokens."""
    gaps = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature  # logits at t score token t + 1
        scored = torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        gaps.append((scored - torch.tensor(completion.logprobs)).abs().max())
    return float(torch.stack(gaps).max())
