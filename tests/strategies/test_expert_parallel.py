"""Ranks that divide the experts of each layer train as one process does, and refuse what they cannot divide."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlflow.models.optimizer import Optimizer
from rlflow.testing.derivative import wide_casts
from tests.models.test_scoring import write
from tests.slow import slow_but
from tests.strategies.reference import distance, plain_update
from tests.strategies.tensor_parallel import divided_update

SGD = Optimizer(name="sgd", lr=0.1, gradient_clipping=0.5)
SIZES = {"vocab_size": 121, "num_key_value_heads": 4, "num_experts_per_tok": 2, "head_dim": 8}
FAMILIES = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 16, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "sliding_window": None}),
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "sliding_window": 8}),
}


def written(folder: Path, family: str) -> Path:
    name, settings = FAMILIES[family]
    return write(folder / family, name, **SIZES | settings)


@cache
def reference(folder: Path) -> tuple[list[dict[str, Tensor]], list[float], dict[str, Tensor]]:
    with wide_casts():
        return plain_update(folder, lambda p: torch.optim.SGD(p, lr=0.1), 0.5, 2, "eager")


# Ranks, of these to a layer, to a sequence, and to the experts of a layer.
DIVISIONS = [(2, 1, 1, 2), (4, 1, 1, 4), (4, 1, 1, 2), (2, 2, 1, 2), (4, 2, 1, 4), (4, 2, 1, 2), (4, 1, 2, 4)]


@pytest.mark.parametrize(
    ("family", "ranks", "layers", "sequences", "experts", "precision"),
    slow_but(
        [("qwen3_moe", 4, 2, 1, 4, "fp64")],
        [
            (family, *division, precision)
            for family in FAMILIES
            for division in DIVISIONS
            if family != "gpt_oss" or division[1] == 1
            for precision in ("fp32", "fp64")
        ],
    ),
)
def test_ranks_that_divide_experts_train_as_plain_torch_in_float64(
    family: str,
    ranks: int,
    layers: int,
    sequences: int,
    experts: int,
    precision: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    folder, pool = written(tmp_path, family), request.getfixturevalue(f"ranks{ranks}")
    allowed = 1e-5 if precision == "fp32" else 1e-10
    gradients, norms, weights = reference(folder)
    for outcome in pool.run(divided_update, folder, layers, SGD, precision, sequences, True, experts):
        for found, expected in zip(outcome.gradients, gradients, strict=True):
            for name, of_weight in expected.items():  # each by itself: a small weight hides behind a large one
                assert distance({name: found[name]}, {name: of_weight}) < allowed, name
        assert outcome.norms == pytest.approx(norms, rel=allowed)
        assert distance(outcome.weights, weights) < allowed
