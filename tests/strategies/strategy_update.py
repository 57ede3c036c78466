"""Run by the ranks of the tests: the reference's update, through a strategy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from rlflow.models.causal_lm import CausalLM
from rlflow.models.optimizer import Optimizer
from rlflow.models.scalar import ValueModel
from rlflow.strategies.deepspeed import DeepSpeedStrategy
from rlflow.strategies.distributed import DistributedStrategy
from rlflow.strategies.fsdp import FSDPStrategy
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.batch import Batch
from rlflow.values.ragged import Ragged
from tests.checkpoint_files import save
from tests.strategies.reference import ROWS, TEMPERATURE, TOKENS, distance

Stage = Literal[0, 1, 2, 3, "fsdp"]  # of ZeRO, or FSDP
# by number of shards: the rows of each micro-batch of each shard; with two the first has fewer, with four one has none
MICRO_BATCHES = {
    1: [[[0], [1, 2], [3, 4, 5, 6]]],
    2: [[[0, 1, 2]], [[3], [4, 5], [6]]],
    3: [[[0, 1], [2]], [[3]], [[4, 5, 6]]],
    4: [[[0], [1, 2]], [[3]], [[]], [[4, 5], [6]]],
}


@dataclass
class Outcome:
    """The results on one rank."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # of each update
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)  # after the last


def check_updates(
    outcome: Outcome, expected: tuple[list[dict[str, Tensor]], list[float], dict[str, Tensor]], allowed: float
) -> None:
    """Compare with what `plain_update` returned, each weight's gradient by itself: a small one hides behind others."""
    gradients, norms, weights = expected
    for found, of_update in zip(outcome.gradients, gradients, strict=True):
        for name, of_weight in of_update.items():
            assert distance({name: found[name]}, {name: of_weight}) < allowed, name
    for found_norm, norm in zip(outcome.norms, norms, strict=True):
        assert abs(found_norm - norm) < allowed * norm
    assert distance(outcome.weights, weights) < allowed


def strategy_of(stage: Stage, precision: str = "fp32", token_budget: int = 4096, **more: Any) -> DistributedStrategy:
    """The strategy that a test means by a stage of ZeRO, or by `fsdp`."""
    settings: dict[str, Any] = {"precision": precision, "token_budget": token_budget, **more}
    return FSDPStrategy(**settings) if stage == "fsdp" else DeepSpeedStrategy(stage, **settings)


def launch(stage: Stage, precision: str = "fp32", token_budget: int = 4096, **more: Any) -> DistributedStrategy:
    """A strategy over the pool's processes."""
    strategy = strategy_of(stage, precision, token_budget, **more)
    Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy.processes).launch()
    return strategy


def rows_of(numbers: list[int]) -> Batch:
    """Rows of the reference as a node sees them."""
    rows = [ROWS[number] for number in numbers]
    lengths = torch.tensor([len(response) for _, response, _ in rows], dtype=torch.int64)
    response_ids = torch.zeros(len(rows), int(lengths.max()) if rows else 0, dtype=torch.int64)
    for row, (_, response, _) in enumerate(rows):
        response_ids[row, : len(response)] = torch.tensor(response)
    mask = torch.arange(response_ids.shape[1]) < lengths[:, None]
    return Batch(Ragged.from_lists([prompt for prompt, _, _ in rows]), response_ids, mask, lengths, [{}] * len(rows))


def backward(strategy: TrainingStrategy, name: str, handle: CausalLM | ValueModel, factor: float = 1.0) -> None:
    """Every backward pass of one update, on a rank of the role; `factor` multiplies this rank's loss."""
    scores = handle.values if isinstance(handle, ValueModel) else handle.logprobs
    layout = strategy.layout(name)
    own = MICRO_BATCHES[layout.shards][layout.shard(strategy.global_rank)]
    count = strategy.agree(name, len(own))
    for part in range(count):
        numbers = own[part] if part < len(own) else []
        weights = torch.tensor([ROWS[number][2] for number in numbers])
        with handle.training():
            scored = scores(rows_of(numbers))  # [B, T], 0 where padded
        strategy.backward(name, -(weights[:, None] * scored).sum() / TOKENS * factor, last=part == count - 1)


def trained(folder: Path, optimizer: Optimizer, checkpointing: bool = False) -> CausalLM:
    """A trained role's handle."""
    return CausalLM(str(folder), optimizer=optimizer, temperature=TEMPERATURE, gradient_checkpointing=checkpointing)


def all_weights(strategy: TrainingStrategy, name: str) -> dict[str, Tensor]:
    """The role's weights now."""
    return {key: weight.clone() for bucket in strategy.weights(name, 100_000) for key, weight in bucket}


def update(
    strategy: TrainingStrategy, folder: Path, optimizer: Optimizer, updates: int = 1, checkpointing: bool = False
) -> Outcome:
    """The reference's updates with one role, which scores rows without gradients before."""
    handle = trained(folder, optimizer, checkpointing)
    strategy.setup_role("actor", handle, folder, updates)
    handle.logprobs(rows_of([0, 1]))
    return updates_of(strategy, handle, updates)


def updates_of(strategy: TrainingStrategy, handle: CausalLM | ValueModel, updates: int) -> Outcome:
    """The reference's updates with a role that is set up."""
    outcome = Outcome()
    for _ in range(updates):
        backward(strategy, "actor", handle)
        outcome.gradients.append({key: value.clone() for key, value in strategy.gradients("actor").items()})
        outcome.norms.append(strategy.step("actor"))
    outcome.weights = all_weights(strategy, "actor")
    return outcome


def one_update(
    folder: Path, stage: Stage, precision: str, optimizer: Optimizer, checkpointing: bool = False
) -> Outcome:
    """One update."""
    return update(launch(stage, precision), folder, optimizer, checkpointing=checkpointing)


def overlapping_update(folder: Path, stage: Stage, overlap_comm: bool, optimizer: Optimizer) -> tuple[bool, Outcome]:
    """Whether DeepSpeed overlaps the reduction of gradients with the backward pass, and one update."""
    strategy = DeepSpeedStrategy(stage, overlap_comm=overlap_comm)  # type: ignore[arg-type]
    Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy.processes).launch()
    outcome = update(strategy, folder, optimizer)
    return strategy._engines["actor"].zero_overlap_comm(), outcome


def two_roles(folders: list[Path], stage: Stage, optimizer: Optimizer) -> list[dict[str, Tensor]]:
    """Two trained roles side by side, one update each, their passes interleaved; their weights."""
    strategy = launch(stage)
    handles = {f"role{number}": trained(folder, optimizer) for number, folder in enumerate(folders)}
    for (name, handle), folder in zip(handles.items(), folders, strict=True):
        strategy.setup_role(name, handle, folder)
    for name, handle in handles.items():
        backward(strategy, name, handle)
    for name in reversed(handles):
        strategy.step(name)
    return [all_weights(strategy, name) for name in handles]


def spoiled_update(folder: Path, stage: Stage, precision: str, optimizer: Optimizer) -> tuple[bool, float, Outcome]:
    """An update that rank 1 makes NaN, then a good one: whether the first kept the weights, its norm, the second."""
    strategy = launch(stage, precision)
    handle = trained(folder, optimizer)
    strategy.setup_role("actor", handle, folder)
    before = all_weights(strategy, "actor")
    backward(strategy, "actor", handle, factor=float("nan") if dist.get_rank() == 1 else 1.0)
    norm = strategy.step("actor")
    after = all_weights(strategy, "actor")
    backward(strategy, "actor", handle)
    second = Outcome(norms=[strategy.step("actor")], weights=all_weights(strategy, "actor"))
    return all(torch.equal(before[key], after[key]) for key in before), norm, second


def update_spoiled_in_one_part(folder: Path, optimizer: Optimizer) -> tuple[bool, float]:
    """An FSDP update with a NaN in rank 1's part of the gradient alone: whether it kept the weights, and its norm."""
    strategy = launch("fsdp", "fp32")
    handle = trained(folder, optimizer)
    strategy.setup_role("actor", handle, folder)
    before = all_weights(strategy, "actor")
    backward(strategy, "actor", handle)
    if dist.get_rank() == 1:
        gradients: list[Any] = [each.grad for each in strategy.roles["actor"].model.parameters()]
        own = next(each.to_local() for each in gradients if each is not None and each.to_local().numel())
        own.view(-1)[0] = float("nan")
    norm = strategy.step("actor")
    after = all_weights(strategy, "actor")
    return all(torch.equal(before[key], after[key]) for key in before), norm


def frozen_scores(folder: Path, stage: Stage) -> tuple[Tensor, bool]:
    """Logprobs of all rows by a frozen role, and whether any weight wants a gradient."""
    strategy = launch(stage, token_budget=16)  # several forward passes on rank 0, one on rank 1
    handle = CausalLM(str(folder), trainable=False, temperature=TEMPERATURE)
    strategy.setup_role("reference", handle, folder)
    scores = handle.logprobs(rows_of(list(range(len(ROWS))) if dist.get_rank() == 0 else [0]))
    wants = any(weight.requires_grad for bucket in strategy.weights("reference", 2**30) for _, weight in bucket)
    return scores, wants or strategy.roles["reference"].optimizer is not None


def bucket_bytes(folder: Path, stage: Stage, limit: int) -> tuple[list[list[int]], dict[str, Tensor]]:
    """The sizes of the tensors in each bucket of weights, and the weights."""
    strategy = launch(stage)
    strategy.setup_role("actor", trained(folder, Optimizer()), folder)
    sizes, weights = [], {}
    for bucket in strategy.weights("actor", limit):
        sizes.append([weight.numel() * weight.element_size() for _, weight in bucket])
        weights |= {key: weight.clone() for key, weight in bucket}
    return sizes, weights


def updates_with_scores(
    folder: Path, optimizer: Optimizer, scores: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after three updates at ZeRO-3, and after a fourth; between them rows may be scored without gradients."""
    strategy, handle = launch(3), trained(folder, optimizer)
    strategy.setup_role("actor", handle, folder)
    for _ in range(3):
        backward(strategy, "actor", handle)
        strategy.step("actor")
    if scores:
        handle.logprobs(rows_of([0, 1]))
    third = all_weights(strategy, "actor")
    backward(strategy, "actor", handle)
    strategy.step("actor")
    return third, all_weights(strategy, "actor")


def save_after_update(
    folder: Path, stage: Stage, optimizer: Optimizer, target: Path, precision: str = "fp32"
) -> dict[str, Tensor]:
    """Write the model after an update; the weights it had."""
    strategy = launch(stage, precision)
    outcome = update(strategy, folder, optimizer)
    save(strategy, "actor", target)
    return outcome.weights


def scheduled_update(folder: Path, stage: Stage, optimizer: Optimizer) -> Outcome:
    """Four of the five updates in the schedule."""
    strategy, handle, outcome = launch(stage), trained(folder, optimizer), Outcome()
    strategy.setup_role("actor", handle, folder, updates=5)
    for _ in range(4):
        backward(strategy, "actor", handle)
        outcome.norms.append(strategy.step("actor"))
    outcome.weights = all_weights(strategy, "actor")
    return outcome


def agreed(stage: Stage) -> int:
    """Rank r says 5 - 2r."""
    return launch(stage).agree("actor", 5 - 2 * dist.get_rank())
