"""One update in float64, in one process, one row at a time: plain torch and transformers, nothing of rlflow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

# (prompt, response, weight of the row's log-probabilities in the loss): uneven in every respect
ROWS = [
    ([17, 33, 40], [65, 66, 67, 68, 69, 70, 71, 72, 73], 1.0),
    ([99], [100], -0.5),
    ([50, 51, 52, 53, 54], [20, 22, 24, 26], 2.0),
    ([77, 78], [30, 35, 40, 45, 50, 55, 60], -1.0),
    ([61, 62, 63], [90, 80], 0.25),
    ([45, 44, 43, 42], [101, 102, 103, 104, 105, 106], 1.5),
    ([110, 111], [37, 38, 39], -2.0),
]
TOKENS = sum(len(response) for _, response, _ in ROWS)
TEMPERATURE = 0.7


def plain_update(
    folder: Path,
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    clip: float,
    updates: int,
    attention: str = "sdpa",
    values: bool = False,
) -> tuple[list[dict[str, Tensor]], list[float], dict[str, Tensor]]:
    """Gradients and norms before clipping of each update, and the weights after the last, by Hugging Face name.

    Buffers that files hold are among the weights. The loss weights log-probabilities, or `values` of a model with one
    label.

    Transformers' attention `eager` caps scores and has sinks, which `sdpa` leaves out, and takes softmax in float32.
    """
    ways = {"attn_implementation": attention, "experts_implementation": "eager"}  # other experts know no float64
    kind, scores = (AutoModelForSequenceClassification, _values) if values else (AutoModelForCausalLM, _logprobs)
    model = kind.from_pretrained(folder, dtype=torch.float64, **ways)
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(list(parameters.values()))
    gradients, norms = [], []
    for _ in range(updates):
        optimizer.zero_grad()
        for prompt, response, weight in ROWS:
            (-weight * scores(model, prompt, response).sum() / TOKENS).backward()
        gradients.append({key: parameter.grad.clone() for key, parameter in parameters.items()})
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), clip)))
        optimizer.step()
    stored = {key: buffer for key, buffer in model.named_buffers() if key in model.state_dict()}
    return gradients, norms, {key: weight.detach() for key, weight in (parameters | stored).items()}


def _logprobs(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    return logprobs[torch.arange(len(response)), torch.tensor(response)]


def _values(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """The number at the token before each response token."""
    states = model.base_model(torch.tensor([prompt + response])).last_hidden_state[0, len(prompt) - 1 : -1]
    values: Tensor = states @ model.score.weight[0]
    return values


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm of what is expected, over all tensors together."""
    assert found.keys() == expected.keys()
    difference = sum(float(((found[key].double() - expected[key]) ** 2).sum()) for key in expected)
    return float((difference / sum(float((value**2).sum()) for value in expected.values())) ** 0.5)
