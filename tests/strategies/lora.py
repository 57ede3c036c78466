"""A strategy with a model that has adapters, and its view without them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import Tensor

from rlflow import CausalLM, LoRA, Optimizer
from rlflow.models.handle import ForwardPlan
from rlflow.models.weights import is_adapter
from rlflow.strategies import SingleProcess
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.testing.derivative import wide_casts
from rlflow.values.layout import Layout
from tests.checkpoint_files import save
from tests.strategies.reference import ROWS, TEMPERATURE
from tests.strategies.strategy_update import Stage, all_weights, backward, launch, rows_of
from tests.strategies.tensor_parallel import dividing

UPDATES, SYNCS = 10, 10


@dataclass(frozen=True)
class Adapted:
    """The results on one rank.

    Attributes:
        gradients: Gradients of the last update.
        merged: The weights handed out after it.
        base_kept: Whether the syncs left what is frozen as it was, to the bit.
        reference: Logprobs of the view before the first update and after the last.
        actor: Logprobs of the model after the last.
        merged_scores: The same of a plain model with the weights handed out.
    """

    gradients: dict[str, Tensor]
    merged: dict[str, Tensor]
    base_kept: bool
    reference: tuple[Tensor, Tensor]
    actor: Tensor
    merged_scores: Tensor


def adapted_updates(strategy: TrainingStrategy, folder: Path, target: Path) -> Adapted:
    """Updates of a model with adapters, and of a view of it, then many syncs; the adapter is saved in `target`."""
    settings = Optimizer("sgd", lr=3.0, gradient_clipping=0.5)
    actor = CausalLM(str(folder), optimizer=settings, temperature=TEMPERATURE, lora=LoRA(rank=4, alpha=8.0))
    reference, rows = actor.without_adapters(), rows_of(list(range(len(ROWS))))
    torch.manual_seed(5)
    strategy.setup_role("actor", actor, folder)
    strategy.setup_role("reference", reference, folder)
    assert reference._forward is actor._forward  # no second copy
    before = reference.logprobs(rows)
    gradients: dict[str, Tensor] = {}
    for _ in range(UPDATES):
        backward(strategy, "actor", actor)
        gradients = {name: gradient.clone() for name, gradient in strategy.gradients("actor").items()}
        strategy.step("actor")
    frozen = _frozen(strategy)
    for _ in range(SYNCS):
        merged = all_weights(strategy, "actor")
    kept = all(torch.equal(tensor, frozen[name]) for name, tensor in _frozen(strategy).items())
    save(strategy, "actor", target)
    return Adapted(
        gradients,
        merged,
        kept,
        (before, reference.logprobs(rows)),
        actor.logprobs(rows),
        _plain_scores(folder, merged),
    )


def two_gradients(strategy: TrainingStrategy, folder: Path) -> list[dict[str, Tensor]]:
    """Gradients of two updates; at the first, one factor of each adapter is still zero."""
    settings = Optimizer("sgd", lr=0.3, gradient_clipping=0.5)
    actor = CausalLM(str(folder), optimizer=settings, temperature=TEMPERATURE, lora=LoRA(rank=4, alpha=8.0))
    torch.manual_seed(5)
    strategy.setup_role("actor", actor, folder)
    found = []
    for _ in range(2):
        backward(strategy, "actor", actor)
        found.append({name: gradient.clone() for name, gradient in strategy.gradients("actor").items()})
        strategy.step("actor")
    return found


def two_gradients_on_ranks(folder: Path, stage: Stage) -> list[dict[str, Tensor]]:
    """The same on the pool's ranks."""
    return two_gradients(launch(stage), folder)


def two_gradients_of_divided_layers(folder: Path, layers: int, experts: int = 1) -> list[dict[str, Tensor]]:
    """The same in float64, with so many ranks to a layer, and to its experts; 1 and 1 in one process."""
    with wide_casts():
        if layers * experts > 1:
            return two_gradients(dividing(layers, "fp64", experts=experts), folder)
        strategy = SingleProcess("fp64")
        Fabric(accelerator="cpu", devices=1, strategy=strategy.processes).launch()
        return two_gradients(strategy, folder)


def on_ranks(folder: Path, stage: Stage, layout: Layout, target: Path) -> Adapted:
    """The same by DeepSpeed."""
    strategy = launch(stage)
    strategy.form_groups({"actor": layout, "reference": layout})
    return adapted_updates(strategy, folder, target)


def _frozen(strategy: TrainingStrategy) -> dict[str, Tensor]:
    model = strategy.roles["actor"].model
    found = {}
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            with strategy._gathered([parameter]):
                found[name] = parameter.detach().clone()
    return found


def _plain_scores(folder: Path, weights: dict[str, Tensor]) -> Tensor:
    plain = CausalLM(str(folder), trainable=False, temperature=TEMPERATURE)
    dtype = next(iter(weights.values())).dtype
    model = plain.load(folder, dtype, torch.device("cpu"))
    for weight in model.weights():
        weight.parameter.data.copy_(weights[weight.name])
    plain.attach(model, ForwardPlan())
    return plain.logprobs(rows_of(list(range(len(ROWS)))))
