"""What the ranks of the tests run to give and take the state of training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from rlflow.models.optimizer import Optimizer
from rlflow.strategies import SingleProcess, TrainingStrategy
from tests.strategies.update import Stage, all_weights, backward, launch, trained

State = dict[str, dict[str, Tensor]]  # by parameter, then kind: full tensors
Pieces = list[tuple[str, torch.Size, str, int, Tensor]]  # parameter, shape, kind, start, values
ADAMW = Optimizer("adamw", lr=1e-2, weight_decay=0.1, gradient_clipping=1.0)


class InMemory:
    """A stored state that was put together from the parts of ranks."""

    def __init__(self, state: State) -> None:
        self.state = state

    def require(self, shapes: dict[str, torch.Size], kinds: Iterable[str]) -> None:
        assert shapes == {key: of["weight"].shape for key, of in self.state.items()}
        assert {*kinds} == {*next(iter(self.state.values()))}

    def read(self, parameter: str, kind: str, start: int, length: int) -> Tensor:
        return self.state[parameter][kind].flatten()[start : start + length]


def strategy_of(stage: Stage | None, precision: str) -> TrainingStrategy:
    return SingleProcess() if stage is None else launch(stage, precision)


def parts_after(model: Path, stage: Stage | None, precision: str, updates: int) -> Pieces:
    """This rank's parts after some updates."""
    strategy = strategy_of(stage, precision)
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
    strategy = strategy_of(stage, precision)
    handle = trained(model, ADAMW)
    strategy.setup_role("actor", handle, model)
    strategy.load_state_parts("actor", InMemory(state), 3)
    given, weights = pieces(strategy), all_weights(strategy, "actor")
    backward(strategy, "actor", handle)
    norm = strategy.step("actor")
    assert strategy.updates_done("actor") == 4
    return given, weights, torch.tensor(norm)


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
