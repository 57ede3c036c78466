"""What the ranks of the tests run where roles live on some of them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow import checkpoint
from rlflow.data.layout import Layout
from rlflow.models.causal_lm import CausalLM
from rlflow.models.optimizer import Optimizer
from rlflow.strategies.strategy import TrainingStrategy
from tests.strategies.reference import ROWS, TEMPERATURE, TOKENS
from tests.strategies.update import Outcome, all_weights, launch, rows_of, trained

# by number of shards: the rows of each micro-batch of each shard
MICRO_BATCHES = {
    1: [[[0], [1, 2], [3, 4, 5, 6]]],
    2: [[[0, 1, 2]], [[3], [4, 5], [6]]],
    3: [[[0, 1], [2]], [[3]], [[4, 5, 6]]],
}


def backward(strategy: TrainingStrategy, name: str, handle: CausalLM) -> None:
    """Every backward pass of one update of the reference, on a rank of the role."""
    layout = strategy.layout(name)
    own = MICRO_BATCHES[layout.shards][layout.shard(dist.get_rank())]
    count = strategy.agree(name, len(own))
    for part in range(count):
        numbers = own[part] if part < len(own) else []
        weights = torch.tensor([ROWS[number][2] for number in numbers])
        with handle.training():
            logprobs = handle.logprobs(rows_of(numbers))  # [B, T], 0 where padded
        strategy.backward(name, -(weights[:, None] * logprobs).sum() / TOKENS, last=part == count - 1)


def side_by_side(
    folders: dict[str, Path],
    layouts: dict[str, Layout],
    stage: int,
    optimizer: Optimizer,
    target: Path | None = None,
    checkpointing: bool = False,
) -> tuple[dict[str, Outcome], Tensor | None]:
    """Two updates of each trained role, their passes interleaved; then each is saved under `target`, if that is given.

    Returns:
        What each trained role of this rank came to, and the logprobs of a frozen `reference` if it is here.
    """
    strategy = launch(stage)
    strategy.form_groups(layouts)
    here = {name: trained(folder, optimizer, checkpointing) for name, folder in folders.items() if strategy.holds(name)}
    for name, handle in here.items():
        strategy.setup_role(name, handle, folders[name], updates=2)
    scores = None
    if strategy.holds("reference"):
        frozen = CausalLM(str(folders["actor"]), trainable=False, temperature=TEMPERATURE)
        strategy.setup_role("reference", frozen, folders["actor"])
        scores = frozen.logprobs(rows_of([0, 1, 2]))
    seen = {name: Outcome() for name in here}
    for _ in range(2):
        for name, handle in here.items():
            backward(strategy, name, handle)
        for name in reversed(here):
            seen[name].gradients.append({key: value.clone() for key, value in strategy.gradients(name).items()})
            seen[name].norms.append(strategy.step(name))
    for name in here:
        seen[name].weights = all_weights(strategy, name)
        if target is not None:
            strategy.save(name, target / name)
    return seen, scores


def train_on(
    model: Path, stage: int, ranks: tuple[int, ...], folder: Path, optimizer: Optimizer, updates: int, resume: bool
) -> dict[str, Tensor] | None:
    """Updates of an actor on some ranks, from the checkpoint in `folder` if told so; then a checkpoint by all ranks."""
    strategy = launch(stage)
    strategy.form_groups({"actor": Layout(ranks, len(ranks))})
    handle = trained(model, optimizer)
    if strategy.holds("actor"):
        strategy.setup_role("actor", handle, model)
    if resume:
        checkpoint.restore(checkpoint.find("last", folder), strategy, ["actor"])
    for _ in range(updates if strategy.holds("actor") else 0):
        backward(strategy, "actor", handle)
        strategy.step("actor")
    progress = checkpoint.Progress(updates, updates, 0, "rows", updates)
    checkpoint.write(folder / "checkpoint", strategy, ["actor"], progress, dist.get_rank(), dist.get_world_size())
    return all_weights(strategy, "actor") if strategy.holds("actor") else None
