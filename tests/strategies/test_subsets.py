"""Roles on different ranks of one job, at every ZeRO stage against plain torch in float64."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow.models.optimizer import Optimizer
from rlflow.values.layout import Layout
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.reference import distance, plain_update
from tests.strategies.strategy_update import Stage
from tests.strategies.subsets import side_by_side, train_on

STAGES: tuple[Stage, ...] = (0, 1, 2, 3, "fsdp")
SGD = Optimizer(name="sgd", lr=0.1, gradient_clipping=0.5)
MOMENTUM = Optimizer("sgd", lr=0.1, gradient_clipping=0.5, arguments={"momentum": 0.9})
# The trained ones overlap on one rank, and the first rank trains nothing.
LAYOUTS = {"actor": Layout((1, 2), 2), "critic": Layout((2,), 1), "reference": Layout((0,), 1)}

Reference = tuple[list[dict[str, Tensor]], list[float], dict[str, Tensor]]


@cache
def reference(folder: Path, updates: int, momentum: float = 0.0) -> Reference:
    return plain_update(folder, lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum), 0.5, updates)


@pytest.mark.parametrize("stage", slow_but((3, "fsdp"), STAGES))
def test_roles_on_overlapping_ranks_each_train_as_in_one_process(
    stage: Stage, tiny: Path, untied: Path, ranks3: RankPool, tmp_path: Path
) -> None:
    folders = {"actor": tiny, "critic": untied}
    found = ranks3.run(side_by_side, folders, LAYOUTS, stage, SGD, tmp_path)
    assert [sorted(seen) for seen, _ in found] == [[], ["actor"], ["actor", "critic"]]
    assert [scores is not None for _, scores in found] == [True, False, False]
    for seen, _ in found:
        for role, outcome in seen.items():
            gradients, norms, weights = reference(folders[role], 2)
            for gradient, expected in zip(outcome.gradients, gradients, strict=True):
                assert distance(gradient, expected) < 1e-6
            assert outcome.norms == pytest.approx(norms, rel=1e-6)
            assert distance(outcome.weights, weights) < 1e-7
    for role in folders:
        saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / role).named_parameters())
        assert all(torch.equal(saved[key], weight) for key, weight in found[2][0][role].weights.items())


@pytest.mark.parametrize(
    ("stages", "before", "after"),
    [
        ((3, 3), Layout((0, 2), 1), Layout((1,), 1)),
        (("fsdp", 2), Layout((1, 2), 2), Layout((0, 1, 2), 3)),
        pytest.param((2, 2), Layout((1, 2), 2), Layout((0, 1, 2), 3), marks=pytest.mark.slow),
        pytest.param((3, 0), Layout((2,), 1), Layout((0, 1), 2), marks=pytest.mark.slow),
        pytest.param((0, 3), Layout((0, 1, 2), 3), Layout((1, 2), 1), marks=pytest.mark.slow),
        pytest.param((3, "fsdp"), Layout((0, 2), 2), Layout((0, 1, 2), 3), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_some_ranks_is_continued_by_others(
    stages: tuple[Stage, Stage],
    before: Layout,
    after: Layout,
    tiny: Path,
    ranks3: RankPool,
    tmp_path: Path,
) -> None:
    ranks3.run(train_on, tiny, stages[0], before, tmp_path, MOMENTUM, 2, False)
    (folder,) = (tmp_path / "checkpoint").iterdir()
    assert json.loads((folder / "actor.json").read_text())["updates"] == 2
    written = {path.name for path in folder.glob("*.safetensors")}
    assert written == {f"actor-{rank:05d}-of-00003.safetensors" for rank in before.ranks}

    found = ranks3.run(train_on, tiny, stages[1], after, tmp_path, MOMENTUM, 1, True)
    assert [weights is not None for weights in found] == [rank in after.ranks for rank in range(3)]
    for weights in filter(None, found):
        assert distance(weights, reference(tiny, 3, 0.9)[2]) < 1e-7
