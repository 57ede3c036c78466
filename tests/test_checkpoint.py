"""A run goes on from a checkpoint as if it had never stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlflow import checkpoint
from rlflow.errors import UserError
from rlflow.models.handle import Optimizer
from rlflow.models.tiny import write_tiny_model
from tests.ranks import RankPool
from tests.strategies.update import all_weights, backward, launch, trained

ADAMW = Optimizer("adamw", lr=1e-2, weight_decay=0.1, warmup_steps=2, gradient_clipping=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices are large enough for ZeRO-3 to divide."""
    return write_tiny_model(tmp_path_factory.mktemp("checkpoint") / "tiny", hidden_size=128, layers=1)


def train_on(
    model: Path, stage: int, precision: str, folder: Path, resume: bool, updates: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Updates of one role, continued from the checkpoint in `folder` or else from the model; then a checkpoint."""
    strategy = launch(stage, precision)
    handle = trained(model, ADAMW)
    strategy.setup_role("actor", handle, model)
    if resume:
        found = checkpoint.find("last", folder)
        checkpoint.restore(found, strategy, checkpoint.read_progress(found, 0, "rows"))
    norms = []
    for _ in range(updates):
        backward(strategy, "actor", handle)
        norms.append(strategy.step("actor"))
    done = strategy.updates_done("actor")
    progress = checkpoint.Progress(done, done, 0, "rows", {"actor": done})
    checkpoint.write(folder / "checkpoint", strategy, progress, dist.get_rank(), dist.get_world_size())
    return norms, all_weights(strategy, "actor")


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (2, "bf16")])
def test_updates_after_a_checkpoint_are_those_of_a_run_that_never_stopped(
    stage: int, precision: str, model: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    through = ranks2.run(train_on, model, stage, precision, tmp_path / "through", False, 4)
    ranks2.run(train_on, model, stage, precision, tmp_path / "parts", False, 2)
    resumed = ranks2.run(train_on, model, stage, precision, tmp_path / "parts", True, 2)
    for (norms, weights), (norms_resumed, weights_resumed) in zip(through, resumed, strict=True):
        assert norms_resumed == norms[2:]
        assert all(torch.equal(weights[name], weights_resumed[name]) for name in weights)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 0), (0, 1)])
def test_another_stage_and_number_of_ranks_continue_a_checkpoint(
    before: int, after: int, model: Path, tmp_path: Path, ranks2: RankPool, ranks1: RankPool
) -> None:
    through = ranks2.run(train_on, model, before, "fp32", tmp_path / "through", False, 4)
    ranks2.run(train_on, model, before, "fp32", tmp_path / "parts", False, 2)
    ((norms, weights),) = ranks1.run(train_on, model, after, "fp32", tmp_path / "parts", True, 2)
    assert norms == pytest.approx(through[0][0][2:], rel=1e-4)
    for name, expected in through[0][1].items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=2e-4)  # AdamW: in units of the rate, 1e-2


def test_a_checkpoint_holds_no_pickle_and_every_rank_wrote_a_part(
    model: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    ranks2.run(train_on, model, 2, "fp32", tmp_path, False, 1)
    (folder,) = (tmp_path / "checkpoint").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [
        "actor-00000-of-00002.safetensors",
        "actor-00001-of-00002.safetensors",
        "state.json",
    ]
    assert json.loads((folder / "state.json").read_text())["step"] == 1


def test_a_run_without_a_checkpoint_has_no_last_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`trainer.ckpt_path` is `last`, but .* has no checkpoint"):
        checkpoint.find("last", tmp_path)


@pytest.mark.parametrize(("seed", "data", "told"), [(1, "rows", "`seed` is 1"), (0, "others", "training rows")])
def test_another_seed_or_dataset_does_not_continue_a_run(seed: int, data: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"format": 1, "step": 2, "version": 2, "seed": 0, "data": "rows"}))
    with pytest.raises(UserError, match=told):
        checkpoint.read_progress(tmp_path, seed, data)
