"""Run by the ranks of the tests where ranks divide each layer."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow import checkpoint
from rlflow.models.causal_lm import CausalLM
from rlflow.models.logprobs import Softmax, divided_logprobs, token_logprobs
from rlflow.models.optimizer import Optimizer
from rlflow.models.scalar import ValueModel
from rlflow.strategies import FSDPStrategy, TrainingStrategy
from rlflow.testing.derivative import wide_casts
from rlflow.values.layout import Layout
from tests.checkpoint_files import save, write_checkpoint
from tests.ranks import RankPool
from tests.strategies.averages import DECAY
from tests.strategies.reference import TEMPERATURE, distance, plain_update
from tests.strategies.state import ADAMW, Pieces
from tests.strategies.strategy_update import (
    Outcome,
    Stage,
    all_weights,
    backward,
    launch,
    rows_of,
    trained,
    update,
    updates_of,
)


class FSDPInFloat64(FSDPStrategy):
    """FSDP that computes and sums in float64."""

    precisions = MappingProxyType({"fp64": torch.float64})


def dividing(
    size: int, precision: str = "fp32", sequences: int = 1, stage: Stage = "fsdp", experts: int = 1
) -> TrainingStrategy:
    """A strategy of all ranks with so many to a layer of `actor` and `reference`, to a sequence, and to its experts."""
    if precision == "fp64":
        strategy: TrainingStrategy = FSDPInFloat64(precision)  # type: ignore[arg-type]
        Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy.processes).launch()
    else:
        strategy = launch(stage, precision)
    world = dist.get_world_size()
    layout = Layout(
        tuple(range(world)), world // size // sequences, tensor_parallel_size=size, expert_parallel_size=experts
    )
    strategy.form_groups({"actor": layout, "reference": layout})
    return strategy


def divided_update(
    folder: Path,
    size: int,
    optimizer: Optimizer,
    precision: str,
    sequences: int = 1,
    checkpointing: bool = False,
    experts: int = 1,
) -> Outcome:
    """Two updates of a role."""
    strategy = dividing(size, precision, sequences, experts=experts)
    if precision != "fp64":
        return update(strategy, folder, optimizer, 2, checkpointing)
    with wide_casts():
        return update(strategy, folder, optimizer, 2, checkpointing)


def divided_critic(folder: Path, size: int, optimizer: Optimizer, experts: int = 1) -> Outcome:
    """Two updates in float64 of a model with one number at each token."""
    strategy, handle = dividing(size, "fp64", experts=experts), ValueModel(str(folder), optimizer=optimizer)
    with wide_casts():
        strategy.setup_role("actor", handle, folder)
        return updates_of(strategy, handle, 2)


def averages(
    folder: Path, size: int, optimizer: Optimizer, experts: int, target: Path, resume: bool = False
) -> list[dict[str, Tensor]]:
    """A model's average after each of two updates in float64, written to a checkpoint or resumed from one."""
    strategy, actor = dividing(size, "fp64", experts=experts), trained(folder, optimizer)
    teacher, both, found = actor.averaged(DECAY), ("actor", "reference"), []
    with wide_casts():
        strategy.setup_role("actor", actor, folder)
        strategy.setup_role("reference", teacher, folder)
        if resume:
            checkpoint.restore(checkpoint.find("last", target), strategy, both)
            return [all_weights(strategy, "reference")]
        for _ in range(2):
            backward(strategy, "actor", actor)
            strategy.step("actor")
            strategy.move_average("reference")
            found.append(all_weights(strategy, "reference"))
        write_checkpoint(strategy, target, 2, both)
    return found


def check_averages(
    folder: Path, pool: RankPool, division: tuple[int, int], other: tuple[int, int], target: Path, optimizer: Optimizer
) -> None:
    """Compare the averages of ranks that divide a model with those of plain torch, and with those resumed otherwise.

    `division` and `other` are ranks to a layer, and to its experts.
    """
    average = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).named_parameters())
    ran = pool.run(averages, folder, division[0], optimizer, division[1], target)
    for number in range(2):
        with wide_casts():
            _, _, weights = plain_update(folder, lambda p: torch.optim.SGD(p, optimizer.lr), 0.5, number + 1, "eager")
        average = {key: DECAY * average[key].detach() + (1 - DECAY) * weights[key] for key in average}
        for found in ran:
            assert distance(found[number], average) < 1e-10
        assert distance(weights, average) > 1e-6  # it is not the model
    for (found,) in pool.run(averages, folder, other[0], optimizer, other[1], target, True):
        for key, of in ran[0][1].items():
            assert torch.equal(found[key], of), key


def train_and_save(
    model: Path,
    size: int,
    folder: Path,
    updates: int,
    resume: bool = False,
    stage: Stage = "fsdp",
    experts: int = 1,
) -> tuple[Pieces, dict[str, Tensor]]:
    """Updates with `size` ranks to a layer, if wanted from the last checkpoint; then a checkpoint and an export.

    Returns:
        This rank's parts of the state after them, and the weights.
    """
    strategy = dividing(size, stage=stage, experts=experts)
    handle = trained(model, ADAMW)
    strategy.setup_role("actor", handle, model)
    done = 0
    if resume:
        checkpoint.restore(checkpoint.find("last", folder), strategy, ["actor"])
        done = strategy.roles["actor"].done
    for _ in range(updates):
        backward(strategy, "actor", handle)
        strategy.step("actor")
    write_checkpoint(strategy, folder, done + updates)
    save(strategy, "actor", folder / "model")
    return rows_of_parts(strategy), all_weights(strategy, "actor")


def rows_of_parts(strategy: TrainingStrategy) -> Pieces:
    """This rank's parts of the state of `actor`; those of a block row by row."""
    return [
        (key, shape, kind, part.start + number * part.width, row.detach().clone())
        for key, shape, parts in strategy.state_parts("actor")
        for kind, part in parts.items()
        for number, row in enumerate(part.values if part.width else part.values[None])
    ]


def loading(small: Path, model: Path, size: int, experts: int = 1) -> tuple[int, int]:
    """Bytes that this rank reads from files to load a frozen model, and bytes of the weights that it then holds."""
    strategy = dividing(size, experts=experts)
    strategy.setup_role("actor", CausalLM(str(small), trainable=False), small)  # imports read files too
    before = _bytes_read()
    strategy.setup_role("reference", CausalLM(str(model), trainable=False), model)
    parts = [parameter.to_local() for parameter in strategy.roles["reference"].model.parameters()]  # type: ignore[operator]
    return _bytes_read() - before, sum(part.nbytes for part in parts)


def norm_of_unlike_gradients(folder: Path) -> float:
    """The norm that a rank takes of gradients of a norm's weight that differ between peers by rounding."""
    strategy, handle = dividing(2), trained(folder, Optimizer("sgd", lr=0.1))
    strategy.setup_role("actor", handle, folder)
    backward(strategy, "actor", handle)
    (weight,) = (each for each in strategy.roles["actor"].model.trained() if each.name == "model.norm.weight")
    assert weight.parameter.grad is not None
    weight.parameter.grad.mul_(1 + dist.get_rank() % 2)
    return strategy.step("actor")


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def readouts(folder: Path, size: int) -> tuple[Tensor, ...]:
    """All kinds of scores of a frozen model, then the gradient of a sum of likeliest tokens' logprobs."""
    strategy = dividing(size)
    frozen, actor = CausalLM(str(folder), trainable=False, temperature=TEMPERATURE), trained(folder, Optimizer())
    strategy.setup_role("reference", frozen, folder)
    strategy.setup_role("actor", actor, folder)
    rows = rows_of([0, 1, 2])
    found = [*frozen.score(rows), *frozen.topk(rows, 3), frozen.hidden(rows)]
    found.append(frozen.logprobs_of(rows, torch.arange(2).expand(*rows.response_ids.shape, 2)))
    found.append(actor.kl(rows, frozen))
    with actor.training():
        loss = actor.topk(rows, 3)[0].sum()
    strategy.backward("actor", loss, last=True)
    return *found, *strategy.gradients("actor").values()


def head(count: int, softmax: Softmax, chunk_elements: int, shift: int = 0) -> list[tuple[Tensor, ...]]:
    """Results of a divided and of a whole output layer: logprobs, entropies, and gradients; in float64.

    Args:
        count: Tokens of the vocabulary.
        softmax: See `divided_logprobs`.
        chunk_elements: See there.
        shift: Rows by which this rank's rows are said to begin too late.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(9, 6, generator=generator).double(),
        torch.randn(count, 6, generator=generator).double(),
    )
    targets = torch.randint(count, (9,), generator=generator)
    of_logprobs, of_entropy = torch.randn(2, 9, generator=generator).double()
    each = -(-count // size)
    rows = slice(rank * each, min(count, (rank + 1) * each))
    found = []
    for whole in (False, True):
        states, matrix = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if whole:
            logprobs, entropy = token_logprobs(states, matrix, targets, softmax)
        else:
            group = dist.group.WORLD
            assert group is not None
            given = (states, matrix[rows], targets, rows.start + shift, group, softmax, chunk_elements)
            logprobs, entropy = divided_logprobs(*given)
        (logprobs * of_logprobs + entropy * of_entropy).sum().backward()
        assert states.grad is not None
        assert matrix.grad is not None
        found.append((logprobs.detach(), entropy.detach(), states.grad, matrix.grad[rows]))
    return found
