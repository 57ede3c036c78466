"""The contents of a checkpoint: each part of a run is restored as it was; and which rank writes what."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any, cast

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlflow.checkpoint import Checkpoint, Progress, RandomStates
from rlflow.context.node_context import MemoryUpdates
from rlflow.controller.gap import LogprobGap
from rlflow.controller.logged_samples import Samples
from rlflow.controller.training import UpdateWatch
from rlflow.data.loader import ChosenRows
from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError
from rlflow.metrics import Metrics
from rlflow.module import RLModule
from rlflow.state import PromptMemory, ReplayBuffer
from rlflow.state.tensors import digest, with_tensors, without_tensors
from tests.checkpoint.test_checkpoint import StopAfter
from tests.controller.runs import Fit, fit, grpo, sums

RANKS = 3
CPU = torch.device("cpu")
FINITE = st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.text("abc/_", min_size=1)
NORMS = st.fixed_dictionaries({"norms": st.lists(FINITE, max_size=32), "skipped": st.integers(0, 5)})
EPOCHS = st.fixed_dictionaries(
    {"number": st.integers(0, 9), "first_draw": st.integers(0, 99), "rows": st.lists(st.integers(0, 2**40))}
)
KINDS = st.sampled_from(["mean", "sum", "largest", "smallest", "seconds"])
HOW = st.tuples(KINDS, st.booleans(), st.booleans(), st.booleans()).map(list)
LOGGED = st.dictionaries(NAMES, st.tuples(HOW, FINITE, FINITE).map(list)).map(
    lambda entries: {"entries": dict(sorted(entries.items()))}
)
MOMENTS = st.tuples(st.integers(1, 9).map(float), FINITE, FINITE).map(list)
GIVEN = st.dictionaries(
    st.tuples(st.integers(0, 9), NAMES, st.integers(0, 9), st.integers(0, 9)),
    st.lists(st.lists(st.lists(FINITE, min_size=2, max_size=2), min_size=6, max_size=6), max_size=2),
)
# A part of a run, and states that it can have.
PARTS: dict[str, tuple[Callable[[], Any], st.SearchStrategy[Any]]] = {
    "updates": (UpdateWatch, st.dictionaries(NAMES, NORMS).map(lambda roles: dict(sorted(roles.items())))),
    "gap": (
        lambda: LogprobGap(None, torch.float32, trial=16),
        st.tuples(st.lists(st.lists(FINITE, min_size=2, max_size=2), max_size=16), st.integers(0, 16)).map(
            lambda parts: {"of": "torch.float32, ", "steps": parts[0], "trial": parts[1]}
        ),
    ),
    "chosen": (
        lambda: ChosenRows(lambda epoch, rows: rows, torch.arange, 4),
        st.lists(EPOCHS).map(lambda epochs: {"per_draw": 4, "epochs": epochs}),
    ),
    "metrics": (
        Metrics,
        st.dictionaries(st.integers(0, 99), LOGGED).map(
            lambda steps: {"steps": [{"step": step, **logged} for step, logged in steps.items()]}
        ),
    ),
    "samples": (
        lambda: Samples(Transport(), 0, str, str, lambda ids: ids, 4),
        st.dictionaries(st.integers(0, 99), st.lists(st.dictionaries(NAMES, NAMES, max_size=2), max_size=2)).map(
            lambda steps: {"steps": [list(step) for step in steps.items()]}
        ),
    ),
    "remembered": (
        lambda: MemoryUpdates(Transport()),
        GIVEN.map(
            lambda of_nodes: {
                "given": [{"step": step, "key": key, "calls": calls} for (step, *key), calls in of_nodes.items()]
            }
        ),
    ),
    "prompt memory": (
        PromptMemory,
        st.dictionaries(st.integers(0, 99), MOMENTS).map(
            lambda rows: {"prompts": sorted(rows), "moments": [rows[row] for row in sorted(rows)]}
        ),
    ),
}


@pytest.mark.parametrize("name", PARTS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_part_has_the_state_that_it_was_given(name: str, data: st.DataObject) -> None:
    make, states = PARTS[name]
    state, part = data.draw(states), make()
    part.load_state_dict(json.loads(json.dumps(state)))
    steps = {"metrics": "steps", "remembered": "given"}.get(name)  # steps by their numbers, in the order of their begin
    found = json.loads(json.dumps(part.state_dict()))
    if steps is not None:
        assert sorted(found[steps], key=json.dumps) == sorted(state[steps], key=json.dumps)
    else:
        assert found == state


@given(st.lists(st.tuples(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9))), max_size=6))
def test_a_replay_buffer_has_the_rows_that_it_was_given(rows: list[tuple[list[int], list[int]]]) -> None:
    def flat(part: int) -> dict[str, Tensor]:
        name = ("prompt", "response")[part]
        of = [torch.tensor(row[part], dtype=torch.int64) for row in rows]
        lengths = torch.tensor([len(row) for row in of], dtype=torch.int64)
        return {f"{name}s": torch.cat([*of, torch.tensor([], dtype=torch.int64)]), f"{name}_lengths": lengths}

    state, replay = flat(0) | flat(1), ReplayBuffer(6)
    replay.load_state_dict(state)
    assert {name: x.tolist() for name, x in replay.state_dict().items()} == {
        name: x.tolist() for name, x in state.items()
    }


def test_random_generators_resume_where_they_were() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.random()), float(torch.rand(()))

    generators = RandomStates(CPU)
    numpy.random.normal()  # keeps a second number for the next call
    state = json.loads(json.dumps(generators.state_dict()))
    first = drawn()
    assert drawn() != first
    generators.load_state_dict(state)
    assert drawn() == first
    generators.load_state_dict(state)
    assert json.loads(json.dumps(generators.state_dict())) == state


def test_a_run_that_continues_has_the_state_that_was_saved(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_steps": 2, "save_every_n_steps": 1, "monitor": "actor/loss", "save_top_k": 1}
    run = Fit(
        grpo(policy), sums(8, 2, held_out=2), tmp_path / "run", settings={**settings, "callbacks": [StopAfter(1)]}
    )
    fit(run)
    (folder,) = (tmp_path / "run/checkpoint").iterdir()
    stored, (logged,) = json.loads((folder / "state.json").read_text()), folder.glob("logged-*")
    restored = []
    monkeypatch.setattr(Checkpoint, "begin", lambda parts: restored.append(parts.agreed(parts.take())))
    fit(
        Fit(grpo(policy), run.data, run.folder, settings={**settings, "ckpt_path": "last", "callbacks": [StopAfter(2)]})
    )
    (found,) = restored
    assert json.loads(json.dumps(found.progress.state)) == stored["state"]
    assert json.loads(json.dumps(found.of_rank)) == json.loads(logged.read_text())
    assert stored["state"].keys() == {"steps", "gaps", "callbacks", "validation", "monitored", "module", "updates"}
    for name in ("gaps", "callbacks", "validation", "monitored", "updates"):
        assert stored["state"][name], name  # else it would be equal anyway


class Stored:
    """A part with this state."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class OneOf:
    """The part of a strategy that `Checkpoint` uses, for this number of ranks."""

    world_size, root_device = RANKS, CPU

    def __init__(self, rank: int) -> None:
        self.global_rank = rank


def checkpoint_of(module: RLModule, rank: int, updates: Stored, gather: Callable[[Any], list[Any]]) -> Checkpoint:
    """The parts of one rank; only module and updates have content."""
    return Checkpoint(
        strategy=cast(Any, OneOf(rank)),
        roles=(),
        module=module,
        changed={"updates": updates},
        alike={"steps": Stored(step=1)},
        of_rank={},
        carried_over=dict,
        take_over=lambda read: None,
        start=Progress(0, 0, "rows"),
        gather=gather,
    )


class Keeps(RLModule):
    def __init__(self) -> None:
        self.mean, self.count = torch.zeros(3), 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "moments": {"mean": self.mean, "of": "rewards"}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean = state["count"], state["moments"]["mean"]


def taken(
    change: Callable[[list[Keeps], list[Stored]], None],
    before: Callable[[list[Keeps], list[Stored]], None] = lambda modules, updates: None,
) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """The parts that each of three ranks writes after `change` has changed them; ranks are threads here.

    `before` changes the parts before the run begins.
    """
    modules, updates = [Keeps() for _ in range(RANKS)], [Stored() for _ in range(RANKS)]
    said, met = [None] * RANKS, Barrier(RANKS)

    def gather(rank: int, here: Any) -> list[Any]:
        said[rank] = json.loads(json.dumps(here))
        met.wait(timeout=30)
        found = [*said]
        met.wait(timeout=30)
        return found

    ranks = [checkpoint_of(modules[rank], rank, updates[rank], partial(gather, rank)) for rank in range(RANKS)]
    before(modules, updates)
    for parts in ranks:
        parts.begin()
    change(modules, updates)
    with ThreadPoolExecutor(RANKS) as threads:
        snapshots = [*threads.map(lambda parts: parts.agreed(parts.take()), ranks)]
    states = [{name: of.progress.state[name] for name in ("module", "updates")} for of in snapshots]
    return [(state, dict(of.tensors)) for state, of in zip(states, snapshots, strict=True)]


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
    def change(modules: list[Keeps], updates: list[Stored]) -> None:
        for module in modules[1:]:  # those that run the node
            module.mean, module.count = torch.tensor([1.0, 2.0, 3.0]), 7

    first, second, third = taken(change)
    assert first[0] == second[0] == {"module": {"count": 7, "moments": {"of": "rewards"}}, "updates": {}}
    assert first[1] == third[1] == {}
    assert torch.equal(second[1]["moments/mean"], torch.tensor([1.0, 2.0, 3.0]))


def test_a_tensor_that_nobody_changed_is_written_by_the_first() -> None:
    first, second, _ = taken(lambda modules, updates: None)
    assert list(first[1]) == ["moments/mean"]
    assert second[1] == {}


def test_a_tensor_that_ranks_change_differently_is_refused() -> None:
    def change(modules: list[Keeps], updates: list[Stored]) -> None:
        for rank, module in enumerate(modules[1:], 1):
            module.mean = torch.full((3,), float(rank))

    message = "`moments/mean` of the module's state is one tensor on rank 1 and another on rank 2"
    with pytest.raises(UserError, match=message) as error:
        taken(change)
    assert "\n" not in str(error.value)


def test_an_entry_is_taken_from_the_rank_that_has_or_changed_it() -> None:
    def change(modules: list[Keeps], updates: list[Stored]) -> None:
        modules[2].count = 5
        updates[1].state, updates[2].state = {"critic": {"norms": [2.0]}}, {"actor": {"norms": [1.0]}}

    expected = {
        "module": {"count": 5, "moments": {"of": "rewards"}},
        "updates": {"critic": {"norms": [2.0]}, "actor": {"norms": [1.0]}},
    }
    assert [state for state, _ in taken(change)] == [expected] * RANKS


def test_state_that_differs_between_ranks_from_the_start_is_saved_as_on_rank_0() -> None:
    def before(modules: list[Keeps], updates: list[Stored]) -> None:
        for rank, module in enumerate(modules):  # as the order of a set does
            module.count, module.mean = rank, torch.full((3,), float(rank))

    every = taken(lambda modules, updates: None, before)
    assert [state["module"]["count"] for state, _ in every] == [0] * RANKS
    assert [list(tensors) for _, tensors in every] == [["moments/mean"], [], []]
