"""Run by the ranks of the tests: saving and restoring the state of training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from rlflow import checkpoint
from rlflow.models.optimizer import Optimizer
from rlflow.strategies import DeepSpeedStrategy, SingleProcess, TrainingStrategy
from tests.checkpoint_files import write_checkpoint
from tests.strategies.strategy_update import Stage, all_weights, backward, launch, rows_of, trained

State = dict[str, dict[str, Tensor]]  # by parameter, then kind: full tensors
Pieces = list[tuple[str, torch.Size, str, int, Tensor]]  # parameter, shape, kind, start, values
ADAMW = Optimizer("adamw", lr=1e-2, weight_decay=0.1, gradient_clipping=1.0)


class InMemory:
    """A stored state that was put together from the parts of ranks."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.elements = 0  # that were read

    def require(self, shapes: dict[str, torch.Size], kinds: Iterable[str] | None) -> None:
        assert shapes == {key: of["weight"].shape for key, of in self.state.items()}
        assert kinds is None or {*kinds} == {*next(iter(self.state.values()))}

    def read(self, parameter: str, kind: str, start: int, length: int) -> Tensor:
        self.elements += length
        return self.state[parameter][kind].flatten()[start : start + length]


def parts_after(model: Path, updates: int) -> Pieces:
    """All parts after some updates in this process, without DeepSpeed."""
    strategy = SingleProcess()
    handle = trained(model, ADAMW)
    strategy.setup_role("actor", handle, model)
    for _ in range(updates):
        backward(strategy, "actor", handle)
        strategy.step("actor")
    return pieces(strategy)


def pieces(strategy: TrainingStrategy) -> Pieces:
    return [
        (key, shape, kind, part.start, part.values.detach().clone())
        for key, shape, parts in strategy.state_parts("actor")
        for kind, part in parts.items()
    ]


def parts_when_given(
    model: Path, stage: Stage | None, precision: str, state: State
) -> tuple[Pieces, dict[str, Tensor], Tensor]:
    """This rank's parts of a state that it was given, the weights that forward passes read, and the next norm."""
    strategy = launch(stage, precision)
    handle = trained(model, ADAMW)
    strategy.setup_role("actor", handle, model)
    strategy.load_state_parts("actor", InMemory(state), 3)
    given, weights = pieces(strategy), all_weights(strategy, "actor")
    backward(strategy, "actor", handle)
    norm = strategy.step("actor")
    assert strategy.roles["actor"].done == 4
    return given, weights, torch.tensor(norm)


def weights_divided_twice(model: Path, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of a state that it was given, by ZeRO-3 with weights divided once more within 2 ranks; and without."""
    found = []
    for settings in ({"hpz_partition_size": 2}, {}):
        strategy = DeepSpeedStrategy(3, **settings)  # type: ignore[arg-type]
        Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy.processes).launch()
        handle = trained(model, ADAMW)
        strategy.setup_role("actor", handle, model)
        strategy.load_state_parts("actor", InMemory(state), 3)
        with handle.training():
            loss = -handle.logprobs(rows_of([0, 1])).sum()
        strategy.backward("actor", loss, last=True)
        found.append({name: gradient.clone() for name, gradient in strategy.gradients("actor").items()})
    return found[0], found[1]


def elements_read(model: Path, stage: Stage, precision: str, state: State) -> int:
    """Number of elements that this rank reads of a state that it is given."""
    strategy = launch(stage, precision)
    strategy.setup_role("actor", trained(model, ADAMW), model)
    stored = InMemory(state)
    strategy.load_state_parts("actor", stored, 3)
    return stored.elements


def restored_parts(model: Path, stage: Stage, precision: str, folder: Path) -> Pieces:
    """This rank's parts after a checkpoint was restored."""
    strategy = launch(stage, precision)
    strategy.setup_role("actor", trained(model, ADAMW), model)
    checkpoint.restore(checkpoint.find("last", folder), strategy, ["actor"])
    return pieces(strategy)


def written_parts(model: Path, stage: Stage, precision: str, folder: Path) -> Pieces:
    """This rank's parts after two updates, after which a checkpoint is written."""
    strategy = launch(stage, precision)
    handle = trained(model, ADAMW)
    strategy.setup_role("actor", handle, model)
    for _ in range(2):
        backward(strategy, "actor", handle)
        strategy.step("actor")
    write_checkpoint(strategy, folder, 2)
    return pieces(strategy)


def put_together(ranks: list[Pieces]) -> State:
    """The full tensors; every element is in one rank's part and in no other's."""
    state: State = {}
    seen: State = {}
    for parts in ranks:
        for key, shape, kind, start, values in parts:
            whole = state.setdefault(key, {}).setdefault(kind, torch.full((shape.numel(),), torch.nan))
            times = seen.setdefault(key, {}).setdefault(kind, torch.zeros(shape.numel()))
            whole[start : start + len(values)] = values
            times[start : start + len(values)] += 1
            state[key][kind] = whole
    shapes = {key: shape for key, shape, *_ in ranks[0]}
    for key, kinds in seen.items():
        for kind, times in kinds.items():
            assert bool((times == 1).all()), (key, kind)
            state[key][kind] = state[key][kind].view(shapes[key])
    return state
