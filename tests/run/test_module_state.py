"""Tensors in the state of a module: which rank writes them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.module import RLModule
from rlflow.run.state import ModuleState
from rlflow.state.tensors import digest, with_tensors, without_tensors

RANKS = 3


class Keeps(RLModule):
    def __init__(self) -> None:
        self.mean, self.count = torch.zeros(3), 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "moments": {"mean": self.mean, "of": "rewards"}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean = state["count"], state["moments"]["mean"]


def taken(change: Callable[[list[Keeps]], None]) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """What each of three ranks gives, after `change` has changed their modules; ranks are threads here."""
    modules, said, met = [Keeps() for _ in range(RANKS)], [None] * RANKS, Barrier(RANKS)

    def state_of(rank: int) -> ModuleState:
        def gather(here: Any) -> list[Any]:
            said[rank] = here
            met.wait(timeout=30)
            return list(said)

        return ModuleState(modules[rank], rank, gather)

    states = [state_of(rank) for rank in range(RANKS)]
    for state in states:
        state.begin()
    change(modules)
    with ThreadPoolExecutor(RANKS) as threads:
        return [
            future.result() for future in [threads.submit(lambda of=state: of.taken(*of.here())) for state in states]
        ]


def test_a_state_with_tensors_at_any_depth_comes_back() -> None:
    state = {"a": torch.arange(3), "b": {"c": {"d": torch.ones(2, 2)}, "e": [1, "x"]}, "f": 2.5, "g": {}}
    rest, tensors = without_tensors(state)
    assert rest == {"b": {"c": {}, "e": [1, "x"]}, "f": 2.5, "g": {}}
    assert list(tensors) == ["a", "b/c/d"]
    back = with_tensors(rest, tensors)
    assert torch.equal(back["b"]["c"]["d"], torch.ones(2, 2))
    assert torch.equal(back["a"], torch.arange(3))
    assert back["b"]["e"] == [1, "x"]
    assert {**back, "a": 0, "b": 0} == {**state, "a": 0, "b": 0}


def test_digests_differ_by_numbers_shape_and_dtype() -> None:
    zeros = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.tensor([0.0, 0, 0, -0.0])]
    assert len({digest(each) for each in zeros}) == 4
    assert digest(torch.zeros(0)) == digest(torch.zeros(0))
    assert digest(torch.tensor(True)) != digest(torch.tensor(False))


def test_the_first_rank_that_changed_a_tensor_writes_it() -> None:
    def change(modules: list[Keeps]) -> None:
        for module in modules[1:]:  # those that run the node
            module.mean, module.count = torch.tensor([1.0, 2.0, 3.0]), 7

    first, second, third = taken(change)
    assert first[0] == second[0] == {"count": 7, "moments": {"of": "rewards"}}
    assert first[1] == third[1] == {}
    assert torch.equal(second[1]["moments/mean"], torch.tensor([1.0, 2.0, 3.0]))


def test_a_tensor_that_nobody_changed_is_written_by_the_first() -> None:
    first, second, _ = taken(lambda modules: None)
    assert list(first[1]) == ["moments/mean"]
    assert second[1] == {}


def test_ranks_that_change_a_tensor_to_different_ones_are_told_so() -> None:
    def change(modules: list[Keeps]) -> None:
        for rank, module in enumerate(modules[1:], 1):
            module.mean = torch.full((3,), float(rank))

    message = "`moments/mean` of the module's state is one tensor on rank 1 and another on rank 2"
    with pytest.raises(UserError, match=message) as error:
        taken(change)
    assert "\n" not in str(error.value)
