"""Run by the ranks of the tests where roles are on some of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rlflow import checkpoint
from rlflow.models.causal_lm import CausalLM
from rlflow.models.optimizer import Optimizer
from rlflow.models.scalar import RewardModel, ValueModel
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.batch import TokenRows
from rlflow.values.layout import Layout
from rlflow.values.ragged import Ragged
from tests.checkpoint_files import save, write_checkpoint
from tests.prefix_rows import forked_rows
from tests.strategies.reference import TEMPERATURE
from tests.strategies.strategy_update import Outcome, Stage, all_weights, backward, launch, rows_of, trained


def side_by_side(
    folders: dict[str, Path],
    layouts: dict[str, Layout],
    stage: Stage,
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
            save(strategy, name, target / name)
    return seen, scores


def train_on(
    model: Path, stage: Stage, layout: Layout, folder: Path, optimizer: Optimizer, updates: int, resume: bool
) -> dict[str, Tensor] | None:
    """Updates of an actor on some ranks, if wanted from the checkpoint in `folder`; then a checkpoint by all ranks."""
    strategy = launch(stage)
    strategy.form_groups({"actor": layout})
    handle = trained(model, optimizer)
    if strategy.holds("actor"):
        strategy.setup_role("actor", handle, model)
    if resume:
        checkpoint.restore(checkpoint.find("last", folder), strategy, ["actor"])
    for _ in range(updates if strategy.holds("actor") else 0):
        backward(strategy, "actor", handle)
        strategy.step("actor")
    write_checkpoint(strategy, folder, updates)
    return all_weights(strategy, "actor") if strategy.holds("actor") else None


def scalar_updates(strategy: TrainingStrategy, folder: Path) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Three updates of a critic towards made-up returns, and of a reward model on the same ranks.

    Returns:
        The gradients of their last, by `<role>/<name>`; then the critic's values, and its scores of the ends of rows.
    """
    rows, returns = rows_of([0, 1, 2, 3, 4]), torch.linspace(-1.0, 1.0, 5)
    optimizer = Optimizer("sgd", lr=0.5, gradient_clipping=0.1)
    critic = ValueModel(str(folder), optimizer=optimizer)
    judge = RewardModel(str(folder), optimizer=optimizer)
    losses: dict[str, Callable[[], Tensor]] = {
        "critic": lambda: ((critic.values(rows) - returns[:, None]).square() * rows.loss_mask).sum() / 40,
        "judge": lambda: (judge.scores(rows) - returns).square().sum() / 5,
    }
    gradients: dict[str, Tensor] = {}
    for name, handle in (("critic", critic), ("judge", judge)):
        strategy.setup_role(name, handle, folder)
        for _ in range(3):  # the output layer starts at 0, so at first it alone has a gradient
            with handle.training():
                loss = losses[name]()
            strategy.backward(name, loss, last=True)
            gradients |= {f"{name}/{key}": value.clone() for key, value in strategy.gradients(name).items()}
            strategy.step(name)
    return gradients, critic.values(rows), critic.final_values(rows)


def scalar_updates_by_two(folder: Path, stage: Stage) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The same with two ranks to a sequence."""
    strategy = launch(stage)
    strategy.form_groups({"critic": Layout((0, 1), 1), "judge": Layout((0, 1), 1)})
    return scalar_updates(strategy, folder)


def forked_update(strategy: TrainingStrategy, folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs of rows that begin alike, and the gradient of a sum of them with a weight each."""
    rows, handle = forked_rows(), trained(folder, Optimizer())
    strategy.setup_role("actor", handle, folder)
    weights = torch.linspace(-1, 1, rows.response_ids.numel()).view(rows.response_ids.shape)
    with handle.training():
        logprobs = handle.logprobs(rows)
    strategy.backward("actor", (weights * logprobs).sum(), last=True)
    return logprobs.detach(), {key: value.clone() for key, value in strategy.gradients("actor").items()}


def forked_update_by_peers(folder: Path, stage: Stage) -> tuple[Tensor, dict[str, Tensor]]:
    """The same with all ranks to a sequence."""
    strategy = launch(stage)
    strategy.form_groups({"actor": Layout(tuple(range(strategy.world_size)), 1)})
    return forked_update(strategy, folder)


def bf16_gradient(folder: Path, stage: Stage, optimizer: Optimizer) -> dict[str, Tensor]:
    """Gradient of an actor with two ranks to a sequence."""
    strategy, handle = launch(stage, "bf16"), trained(folder, optimizer)
    strategy.form_groups({"actor": Layout((0, 1), 1)})
    strategy.setup_role("actor", handle, folder)
    backward(strategy, "actor", handle)
    return {key: value.clone() for key, value in strategy.gradients("actor").items()}


def held_bytes(folder: Path, shards: int) -> int:
    """Bytes that the forward pass of a line of 2,047 tokens stores for its backward pass on this one of two ranks."""
    strategy, handle = launch(2), trained(folder, Optimizer())
    strategy.form_groups({"actor": Layout((0, 1), shards)})
    strategy.setup_role("actor", handle, folder)
    weights = {weight.data_ptr() for weight in strategy.roles["actor"].model.parameters()}
    kept: dict[int, int] = {}  # bytes by address: what is kept is not freed meanwhile

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    response = torch.full((1, 2000), 70)
    rows = TokenRows(Ragged.from_lists([[65] * 48]), response, torch.tensor([2000]))
    with handle.training(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = handle.logprobs(rows).sum()
    strategy.backward("actor", loss, last=True)
    return sum(kept.values())
