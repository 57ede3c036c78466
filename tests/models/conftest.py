"""Fixtures of the tests of models: a small model on disk, ragged rows, and an independent reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rlflow.models.causal_lm import CausalLM
from rlflow.models.handle import ForwardPlan
from rlflow.models.tiny import write_tiny_model
from rlflow.values.batch import Batch
from rlflow.values.protocols import Tokens
from rlflow.values.ragged import Ragged

# Prompt and response tokens of each row; one row has no response, one has a single token.
PROMPTS = (3, 4, 1, 7, 2, 6)
RESPONSES = (5, 0, 17, 1, 30, 9)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers whose weights are large enough for tokens to differ by whole nats."""
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden_size=32, layers=2)
    weights = load_file(folder / "model.safetensors")
    scaled = {name: tensor if "norm" in name else 10 * tensor for name, tensor in weights.items()}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def classifier(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same layers below an output layer with one label; `!`, which responses hold, is said to be padding."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1, pad_token_id=33)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    folder = tmp_path_factory.mktemp("models") / "classifier"
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def rows() -> Batch:
    """Six rows of random tokens."""
    return random_rows(PROMPTS, RESPONSES)


def random_rows(prompts: tuple[int, ...], responses: tuple[int, ...]) -> Batch:
    """Rows of these lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor(responses, dtype=torch.int64)
    tokens = torch.randint(32, 127, (len(responses), max(responses, default=0)), generator=generator)
    mask = torch.arange(tokens.shape[1]) < lengths[:, None]
    prompt_ids = torch.randint(32, 127, (sum(prompts),), generator=generator)
    return Batch(
        prompt_ids=Ragged(prompt_ids, torch.tensor(prompts, dtype=torch.int64)),
        response_ids=tokens * mask,
        loss_mask=mask,
        lengths=lengths,
        rows=[{}] * len(prompts),
    )


@pytest.fixture
def handle(tiny: Path) -> Callable[..., CausalLM]:
    """`handle(plan, dtype=torch.float64, **settings)`: an attached model."""

    def build(plan: ForwardPlan, dtype: torch.dtype = torch.float64, **settings: object) -> CausalLM:
        model = CausalLM(str(tiny), **settings)
        model.attach(model.load(tiny, dtype, torch.device("cpu")), plan)
        return model

    return build


def one_by_one(model: torch.nn.Module, rows: Tokens, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """`[B, T]` logprobs and entropies by transformers' own forward of each row alone, without padding."""
    logprobs = torch.zeros(rows.response_ids.shape, dtype=model.dtype)
    entropy = torch.zeros_like(logprobs)
    for row, prompt in enumerate(rows.prompt_ids.rows()):
        response = rows.response_ids[row, : rows.lengths[row]]
        logits = model(torch.cat([prompt, response])[None]).logits[0]
        for t, token in enumerate(response):
            distribution = torch.distributions.Categorical(logits=logits[len(prompt) + t - 1] / temperature)
            logprobs[row, t] = distribution.log_prob(token)
            entropy[row, t] = distribution.entropy()
    return logprobs, entropy


def scalars_one_by_one(model: torch.nn.Module, rows: Tokens) -> tuple[Tensor, Tensor]:
    """`[B, T]` numbers before each response token and `[B]` after the last: transformers' forward of each prefix."""
    model.config.pad_token_id = None  # it reads the last token that is not padding: here, the last of the prefix
    before = torch.zeros(rows.response_ids.shape, dtype=model.dtype)
    final = []
    for row, prompt in enumerate(rows.prompt_ids.rows()):
        tokens = torch.cat([prompt, rows.response_ids[row, : rows.lengths[row]]])
        numbers = [model(tokens[None, :end]).logits[0, 0] for end in range(len(prompt), len(tokens) + 1)]
        for t, number in enumerate(numbers[:-1]):
            before[row, t] = number
        final.append(numbers[-1])
    return before, torch.stack(final)
