"""The graph: what is read from an instance, and every problem with it."""

from __future__ import annotations

import importlib.util
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.dag.graph import Graph, GraphError, Problem
from rlflow.dag.node import node
from rlflow.errors import UserError
from rlflow.values.batch import Batch
from rlflow.values.column_kinds import PerSample, PerToken, Scalar
from rlflow.values.rollout import Rollout
from tests.dag.modules import GRPO, ROLES, SFT
from tests.dag.problems import problems


def test_the_mark_leaves_the_method_as_it_is() -> None:
    def rewards(self: object) -> int:
        return 3

    assert node(rewards) is rewards
    assert node(role="actor")(rewards) is rewards
    assert rewards(None) == 3


def test_a_role_without_its_name_is_refused_where_it_is_written() -> None:
    with pytest.raises(UserError, match=r'Write `@node\(role="actor"\)`'):
        node("actor")


def test_nodes_stand_in_the_order_of_declaration() -> None:
    names = ["rollout", "rewards", "advantages", "ref_logprobs", "old_logprobs", "actor_loss"]
    assert list(Graph.read(GRPO(), ROLES).nodes) == names


def test_execution_goes_by_depth_then_declaration() -> None:
    # depth 1: rollout; 2: rewards, ref_logprobs, old_logprobs; 3: advantages; train last
    names = ["rollout", "rewards", "ref_logprobs", "old_logprobs", "advantages", "actor_loss"]
    assert [step.id for step in Graph.read(GRPO(), ROLES).order] == names


def test_train_nodes_run_after_all_others_whatever_their_depth() -> None:
    class Module(SFT):
        @node
        def lengths(self, batch: Batch) -> PerSample: ...

        @node
        def shares(self, lengths: PerSample) -> PerSample: ...

    assert [step.id for step in Graph.read(Module(), ROLES).order] == ["lengths", "shares", "actor_loss"]


def test_an_override_keeps_its_role_and_its_place() -> None:
    class Module(GRPO):
        def ref_logprobs(self, rollout: Rollout) -> PerToken: ...

    graph = Graph.read(Module(), ROLES)
    assert graph.nodes["ref_logprobs"].role == "reference"
    assert list(graph.nodes) == list(Graph.read(GRPO(), ROLES).nodes)
    assert graph.nodes["ref_logprobs"].line == Module.ref_logprobs.__code__.co_firstlineno


def test_a_new_mark_replaces_the_old_one() -> None:
    class Module(GRPO):
        @node(role="actor")
        def ref_logprobs(self, rollout: Rollout) -> PerToken: ...

    assert Graph.read(Module(), ROLES).nodes["ref_logprobs"].role == "actor"


def test_none_on_a_class_removes_a_node_and_the_optional_input() -> None:
    class Module(GRPO):
        old_logprobs = None

    graph = Graph.read(Module(), ROLES)
    assert "old_logprobs" not in graph.nodes
    assert graph.nodes["actor_loss"].reads == ("rollout", "advantages", "ref_logprobs")


def test_none_on_an_instance_removes_a_node_of_this_instance_only() -> None:
    module = GRPO()
    module.ref_logprobs = None
    graph = Graph.read(module, ROLES)
    assert "ref_logprobs" not in graph.nodes
    assert list(graph.roles()) == ["actor"]
    assert graph.policies() == ("actor",)
    assert "ref_logprobs" in Graph.read(GRPO(), ROLES).nodes


def test_the_kind_follows_from_role_and_type() -> None:
    kinds = {step.id: step.kind for step in Graph.read(GRPO(), ROLES).order}
    assert kinds == {
        "rollout": "rollout",
        "rewards": "compute",
        "ref_logprobs": "model_inference",
        "old_logprobs": "model_inference",
        "advantages": "compute",
        "actor_loss": "train",
    }


def test_readers_come_in_the_order_of_execution() -> None:
    readers = Graph.read(GRPO(), ROLES).readers("rollout")
    assert [step.id for step in readers] == ["rewards", "ref_logprobs", "old_logprobs", "advantages", "actor_loss"]


def test_a_wrapped_method_is_placed_where_it_is_written() -> None:
    class Module(GRPO):
        @torch.no_grad()
        @node(role="reference")
        def ref_logprobs(self, rollout: Rollout) -> PerToken: ...

    step = Graph.read(Module(), ROLES).nodes["ref_logprobs"]
    assert step.file == __file__
    assert step.reads == ("rollout",)


def test_a_subclass_of_the_type_that_is_read_fits() -> None:
    @dataclass(frozen=True)
    class Scored(Rollout):
        scores: PerSample

    class Module(GRPO):
        @node(role="rollout")
        def rollout(self, batch: Batch) -> Scored: ...

    Module.rollout.__annotations__["return"] = Scored  # a class of this function is not seen by name
    assert Graph.read(Module(), ROLES).nodes["rollout"].returns is Scored


def test_a_tensor_parameter_takes_any_tensor() -> None:
    class Module(GRPO):
        def advantages(self, rollout, rewards: torch.Tensor) -> PerSample: ...

    assert Graph.read(Module(), ROLES).nodes["advantages"].reads == ("rollout", "rewards")


def test_all_problems_are_reported_together_with_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """\
from rlflow.dag.node import node
from rlflow import Batch, PerSample, PerToken, Rollout

class Wrong:
    @node(role="rollout")
    def rollout(self, batch: Batch) -> PerSample: ...

    @node
    def rewards(self, rolout: Rollout) -> PerSample: ...

    @node
    def advantages(self, rewards: PerToken): ...

    @node(role="refrence")
    def ref_logprobs(self, *values: Rollout) -> PerToken: ...
"""
    (tmp_path / "wrong.py").write_text(source)
    spec = importlib.util.spec_from_file_location("wrong", tmp_path / "wrong.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GraphError) as error:
        Graph.read(module.Wrong(), ROLES)
    assert str(error.value).splitlines() == [
        "6 problems in the graph:",
        "  wrong.py:5: `rollout` generates and returns PerSample, not `Rollout`."
        " Return what `generate` makes, and compute in another node",
        '  wrong.py:8: `rewards` reads `rolout`, which no node makes. Did you mean "rollout"?',
        "  wrong.py:11: `advantages` has no return type, which says how its value is cut by rows."
        " Write `-> PerSample`, `-> PerToken` or a frozen dataclass of them",
        "  wrong.py:11: `advantages` reads `rewards` as PerToken, but `rewards` returns PerSample (wrong.py:8)."
        " Correct one",
        "  wrong.py:14: parameter `*values` of `ref_logprobs` is variadic positional, and values are passed"
        " by name. Write each value that is read as a parameter of its own",
        "  wrong.py:14: `ref_logprobs` has role 'refrence', which names no model handle of the module."
        ' Did you mean "reference"?',
    ]


def test_one_problem_is_one_line() -> None:
    error = GraphError(Problem("/a/b.py", 3, "`x` waits for itself"))
    assert str(error) == "/a/b.py:3: `x` waits for itself"


def test_a_graph_error_travels_between_processes() -> None:
    error = GraphError(Problem("/a/b.py", 3, "one"), Problem("/a/b.py", 4, "two"))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_missing_value_without_a_near_name_lists_the_values() -> None:
    class Module(SFT):
        @node
        def a(self, xyz: PerSample) -> PerSample: ...

    assert problems(Module()) == ["`a` reads `xyz`, which no node makes. The values are batch, actor_loss, a."]


def test_the_reader_of_a_removed_node_is_a_problem_that_says_so() -> None:
    class Module(GRPO):
        rewards = None

    assert problems(Module()) == [
        "`advantages` reads `rewards`, a node that was set to None. Give the parameter a default"
    ]


def test_the_reader_of_an_unmarked_method_is_a_problem_that_says_so() -> None:
    class Module(GRPO):
        def penalty(self, rollout: Rollout) -> PerSample: ...

        def advantages(self, rollout: Rollout, rewards: PerSample, penalty: PerSample) -> PerSample: ...

    assert problems(Module()) == ["`advantages` reads `penalty`, a method that is not a node. Mark it with `@node`"]


def test_the_loss_of_a_train_node_cannot_be_read() -> None:
    class Module(SFT):
        @node
        def a(self, actor_loss: PerToken) -> PerSample: ...

    (problem,) = problems(Module())
    assert problem.startswith("`a` reads `actor_loss`, a train node (tests/dag/modules.py:")


def test_every_cycle_is_named() -> None:
    class Module(SFT):
        @node
        def a(self, b: PerSample) -> PerSample: ...

        @node
        def b(self, a: PerSample) -> PerSample: ...

        @node
        def c(self, a: PerSample, c: PerSample) -> PerSample: ...

    assert problems(Module()) == [
        "`a` waits for itself: `a` -> `b` -> `a`. Break the cycle",
        "`c` waits for itself: `c` -> `c`. Break the cycle",
    ]


def test_a_cycle_follows_the_values() -> None:
    class Module(SFT):  # a makes what b reads, b what c reads, c what a reads
        @node
        def a(self, c: PerSample) -> PerSample: ...

        @node
        def b(self, a: PerSample) -> PerSample: ...

        @node
        def c(self, b: PerSample) -> PerSample: ...

    assert problems(Module()) == ["`a` waits for itself: `a` -> `b` -> `c` -> `a`. Break the cycle"]


def test_a_train_node_needs_a_role() -> None:
    class Module:
        @node(type="train")
        def actor_loss(self, batch: Batch) -> PerToken: ...

    assert problems(Module()) == [
        '`actor_loss` trains and has no role. Name the model it trains: `@node(role="...", type="train")`'
    ]


def test_a_train_node_returns_an_unreduced_loss() -> None:
    class Module(SFT):
        def actor_loss(self, batch: Batch) -> Scalar: ...

    assert problems(Module()) == [
        "`actor_loss` trains and returns Scalar; a loss is cut by rows."
        " Return it unreduced, `-> PerToken` or `-> PerSample`"
    ]


def test_a_per_token_loss_reads_just_one_mask() -> None:
    class Both(GRPO):
        def actor_loss(self, batch: Batch, rollout: Rollout) -> PerToken: ...

    class Neither(GRPO):
        def actor_loss(self, advantages: PerSample) -> PerToken: ...

    start = "`actor_loss` needs one value whose `loss_mask` masks its loss, and reads"
    assert problems(Both()) == [f"{start} 2 values with a `loss_mask` (batch, rollout). Read just one"]
    assert problems(Neither()) == [f"{start} none. Read just one"]


def test_an_unknown_role_lists_the_roles() -> None:
    class Module(SFT):
        @node(role="xyz")
        def a(self, batch: Batch) -> PerSample: ...

    assert problems(Module()) == [
        "`a` has role 'xyz', which names no model handle of the module. The roles are actor, reference, rollout."
    ]


def test_a_loss_per_sample_says_too_which_rows_it_is_of() -> None:
    class Module(SFT):
        @node
        def lengths(self, batch: Batch) -> PerSample: ...

        @node(role="actor", type="train")
        def actor_loss(self, lengths: PerSample) -> PerSample: ...

    assert problems(Module()) == [
        "`actor_loss` needs one value whose `loss_mask` masks its loss, and reads none. Read just one"
    ]


def test_the_role_rollout_reads_as_the_first_language_model_that_is_trained() -> None:
    class Module(GRPO):
        @node(role="critic", type="train")
        def a_critic_loss(self, rollout: Rollout) -> PerToken: ...

    graph = Graph.read(Module(), (*ROLES, "critic"), policies=("reference", "actor"))
    assert graph.nodes["rollout"].generates == ("actor",)
    assert graph.nodes["rollout"].role is None


@pytest.mark.parametrize(
    ("marks", "line"),
    [
        ({"generates": "acter"}, "generates with 'acter', which names no model handle of the module. Did you mean"),
        (
            {"generates": ("actor", "critic")},
            "generates with 'critic', which is not a language model; only a CausalLM generates, and those are actor,"
            " reference. Name one of them",
        ),
        (
            {"generates": "actor", "role": "reference"},
            "has `generates='actor'` and `role='reference'`; a node generates or has a role. Score in",
        ),
        (
            {"generates": "actor", "type": "filter"},
            "is a filter and generates, and what samples cannot choose or train. Generate in a node of its own, and",
        ),
    ],
)
def test_marks_that_cannot_generate_are_reported(marks: dict[str, Any], line: str) -> None:
    class Module(GRPO):
        @node(**marks)
        def more(self, batch: Batch) -> Rollout: ...

    with pytest.raises(GraphError) as error:
        Graph.read(Module(), (*ROLES, "critic"), policies=("actor", "reference"))
    assert [str(problem) for problem in error.value.problems if f"`more` {line}" in str(problem)], str(error.value)


def test_misspelt_marks_are_reported() -> None:
    class Module(SFT):
        @node(role="actor", type="trian")
        def a(self, batch: Batch) -> PerToken: ...

    assert problems(Module()) == [
        "`type='trian'` of `a` is not 'train' or 'filter'. Did you mean \"train\"?",
    ]


def test_parameters_are_passed_by_name() -> None:
    class Module(SFT):
        @node
        def a(self, batch: Batch, /, **more: PerSample) -> PerSample: ...

        @node
        def b(batch: Batch) -> PerSample: ...

    by_name = "and values are passed by name. Write each value that is read as a parameter of its own"
    assert problems(Module()) == [
        f"parameter `batch` of `a` is positional-only, {by_name}",
        f"parameter `**more` of `a` is variadic keyword, {by_name}",
        "the first parameter of `b` is not `self`. Add it: a node is a plain method",
    ]


def test_no_node_is_called_batch() -> None:
    class Module(SFT):
        @node
        def batch(self) -> PerSample: ...

    assert problems(Module()) == ["a node may not be called `batch`, the name of the dataset's rows. Rename it"]


def test_an_attribute_that_hides_a_node_is_reported() -> None:
    module = GRPO()
    module.rewards = 1.0
    assert problems(module) == [
        "`rewards` is a float, not a plain method, so the node of that name cannot run."
        " Rename the attribute, or set it to None to remove the node"
    ]


class Twice(SFT):
    @node
    def a(self, batch: Batch) -> PerSample: ...

    @node
    def a(self, batch: Batch) -> PerToken: ...  # noqa: F811


def test_two_nodes_of_one_name_in_one_class_are_reported() -> None:
    (problem,) = problems(Twice())
    assert problem.startswith("`a` is defined before, in line ")


def test_a_class_typed_at_a_prompt_is_read_without_its_source() -> None:
    names: dict[str, Any] = {"__name__": "typed", "node": node, "Batch": Batch, "PerToken": PerToken}
    exec(
        "class Typed:\n"
        "    @node(role='actor', type='train')\n"
        "    def actor_loss(self, batch: Batch) -> PerToken: ...\n",
        names,
    )
    assert list(Graph.read(names["Typed"](), ROLES).nodes) == ["actor_loss"]


def test_a_module_without_nodes_is_reported() -> None:
    with pytest.raises(UserError, match=r"`Empty` has no node. Mark the steps of the algorithm with `@node`"):
        Graph.read(type("Empty", (), {})(), ROLES)
