"""Ranks that divide each layer train as one process does, and refuse what they cannot divide."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlflow.models.optimizer import Optimizer
from tests.forks import wide_casts
from tests.models.test_scoring import write
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.reference import distance, plain_update
from tests.strategies.tensor_parallel import divided_update

SGD = Optimizer(name="sgd", lr=0.1, gradient_clipping=0.5)
# Neither 2 nor 4 ranks divide the tokens; one of the prompts has the token that pads.
SIZES = {"vocab_size": 121, "num_key_value_heads": 4, "pad_token_id": 40}
FAMILIES = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "tied qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": False}),
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": 4, "tie_word_embeddings": True}),
}


def written(folder: Path, family: str) -> Path:
    name, settings = FAMILIES[family]
    return write(folder / family, name, **SIZES | settings)


@cache
def reference(folder: Path) -> tuple[list[dict[str, Tensor]], list[float], dict[str, Tensor]]:
    with wide_casts():
        return plain_update(folder, lambda p: torch.optim.SGD(p, lr=0.1), 0.5, 2, "eager")


@pytest.mark.parametrize(
    ("family", "ranks", "size", "precision", "checkpointing"),
    slow_but(
        [("qwen3", 4, 2, "fp64", True)],
        [
            (family, ranks, size, precision, ranks == 2)
            for family in FAMILIES
            for ranks, size in ((2, 2), (4, 2), (4, 4))
            for precision in ("fp32", "fp64")
        ]
        + [("qwen3", 4, 2, "fp64", True)],
    ),
)
def test_ranks_that_divide_each_layer_train_as_plain_torch_in_float64(
    family: str,
    ranks: int,
    size: int,
    precision: str,
    checkpointing: bool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    folder, pool = written(tmp_path, family), request.getfixturevalue(f"ranks{ranks}")
    allowed = 1e-5 if precision == "fp32" else 1e-10
    gradients, norms, weights = reference(folder)
    for outcome in pool.run(divided_update, folder, size, SGD, precision, 1, checkpointing):
        for found, expected in zip(outcome.gradients, gradients, strict=True):
            for name, of_weight in expected.items():  # each by itself: a small weight hides behind a large one
                assert distance({name: found[name]}, {name: of_weight}) < allowed, name
        assert outcome.norms == pytest.approx(norms, rel=allowed)
        assert distance(outcome.weights, weights) < allowed
