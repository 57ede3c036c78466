"""What differs between two algorithms, in lines that name the places of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.commands.graph_difference import Algorithm, difference
from rlflow.dag.graph import Graph
from rlflow.dag.node import place
from rlflow.values.cuts import PerSample, PerToken
from rlflow.values.rollout import Rollout
from tests.dag.modules import GRPO, ROLES, SFT, ReMax


class Calls(GRPO):
    """A node that calls a method which is none."""

    def actor_loss(self, rollout: Rollout, advantages: PerSample) -> PerToken: ...

    def surrogate(self) -> None: ...


class Varied(Calls):
    """Overrides what the node calls."""

    def surrogate(self) -> None: ...


def algorithm(module: object, settings: Mapping[str, Any] | None = None) -> Algorithm:
    """As it is read from a config or a class."""
    return Algorithm(module, Graph.read(module, ROLES), settings or {})


def written(cls: type, name: str) -> str:
    """Where a method is."""
    code = vars(cls)[name].__code__
    return place(code.co_filename, code.co_firstlineno)


def lines(left: Algorithm, right: Algorithm) -> list[str]:
    """Without the two that name the classes, and without indents."""
    return [line.strip() for line in difference(left, right).splitlines()[2:] if line]


def test_an_algorithm_does_not_differ_from_itself() -> None:
    settings = {"group_size": 8, "score": Score(0.5)}
    same = {"group_size": 8, "score": Score(0.5)}
    assert difference(algorithm(ReMax(), settings), algorithm(ReMax(), same)) == "no difference"


def test_both_classes_are_named_with_their_places() -> None:
    first, second, *_ = difference(algorithm(GRPO()), algorithm(ReMax())).splitlines()
    assert first.startswith("- GRPO  tests/dag/modules.py:")
    assert second.startswith("+ ReMax  tests/dag/modules.py:")


def test_nodes_of_one_and_nodes_that_changed() -> None:
    assert lines(algorithm(GRPO()), algorithm(ReMax())) == [
        "nodes:",
        f"~ advantages      {written(GRPO, 'advantages')} -> {written(ReMax, 'advantages')}",
        "reads rollout, rewards -> rewards, baseline",
        f"- ref_logprobs    {written(GRPO, 'ref_logprobs')}  type MODEL_INFERENCE, role reference, reads rollout,"
        " returns PerToken, rows of rollout",
        "~ actor_loss      reads rollout, advantages, old_logprobs, ref_logprobs -> rollout, advantages, old_logprobs",
        f"+ greedy          {written(ReMax, 'greedy')}  type ROLLOUT, role actor, reads batch, returns Rollout,"
        " rows of greedy",
        f"+ greedy_rewards  {written(ReMax, 'greedy_rewards')}  type COMPUTE, reads greedy, returns PerSample,"
        " rows of greedy",
        f"+ baseline        {written(ReMax, 'baseline')}  type COMPUTE, reads batch, greedy_rewards, returns PerSample,"
        " rows of batch",
    ]


def test_a_change_of_rows_and_role_is_told() -> None:
    assert "rows of rollout -> batch" in lines(algorithm(GRPO()), algorithm(SFT()))


def test_a_method_that_nodes_call_is_compared_too() -> None:
    assert lines(algorithm(Calls()), algorithm(Varied())) == [
        "methods:",
        f"~ surrogate  {written(Calls, 'surrogate')} -> {written(Varied, 'surrogate')}",
    ]


def test_a_node_that_an_instance_removed_is_no_method() -> None:
    module = GRPO()
    module.ref_logprobs = None  # type: ignore[method-assign, assignment]
    assert "ref_logprobs" not in difference(algorithm(SFT()), algorithm(module))


class Score:
    """An object that Python compares by identity."""

    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus = bonus


def test_settings_of_one_and_settings_of_another_value() -> None:
    left = algorithm(GRPO(), {"group_size": 8, "std": True, "score": Score(1.0)})
    right = algorithm(GRPO(), {"group_size": 8, "std": False, "gamma": 0.9, "score": Score(1.0)})
    assert lines(left, right) == ["settings:", "~ std    True -> False", "+ gamma  0.9"]
