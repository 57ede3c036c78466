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
from rlflow.values.batch import Batch, Pairs
from rlflow.values.cuts import PerSample, PerToken, Scalar
from rlflow.values.rollout import Rollout
from tests.dag.modules import GRPO, ROLES, SFT, Filtered, ReMax


def problems(module: object, roles: tuple[str, ...] = ROLES) -> list[str]:
    """What is wrong with the module's graph, without the places."""
    with pytest.raises(GraphError) as error:
        Graph.read(module, roles)
    return [problem.message for problem in error.value.problems]


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
    assert list(graph.roles()) == ["rollout", "actor"]
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


def test_values_keep_the_rows_of_what_they_read() -> None:
    spaces = {step.id: step.space for step in Graph.read(ReMax(), ROLES).order}
    assert spaces == {
        "rollout": "rollout",
        "rewards": "rollout",
        "old_logprobs": "rollout",
        "greedy": "batch",
        "baseline": "batch",
        "advantages": "rollout",  # reads `rewards` of samples beside `baseline` of prompts
        "actor_loss": "rollout",
    }


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


def test_all_problems_are_told_at_once_with_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        "  wrong.py:5: `rollout` has role 'rollout' and returns PerSample, not `Rollout`."
        " Return what `self.generate` makes, and compute in another node",
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


def test_the_reader_of_a_removed_node_is_told_so() -> None:
    class Module(GRPO):
        rewards = None

    assert problems(Module()) == [
        "`advantages` reads `rewards`, a node that was set to None. Give the parameter a default"
    ]


def test_the_reader_of_an_unmarked_method_is_told_so() -> None:
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


def test_types_must_agree_along_an_edge() -> None:
    class Module(GRPO):
        def advantages(self, rollout: Rollout, rewards: PerSample) -> PerToken: ...

    (problem,) = problems(Module())
    assert problem.startswith("`actor_loss` reads `advantages` as PerSample, but `advantages` returns PerToken (")


def test_an_optional_input_is_checked_without_its_none() -> None:
    class Module(GRPO):
        def old_logprobs(self, rollout: Rollout) -> PerSample: ...

    (problem,) = problems(Module())
    assert problem.startswith("`actor_loss` reads `old_logprobs` as PerToken | None, but")


def test_the_batch_is_a_batch() -> None:
    class Module(SFT):
        def actor_loss(self, batch: Rollout) -> PerToken: ...

    assert problems(Module()) == ["`actor_loss` reads `batch` as Rollout, but it is a Batch, or Pairs. Correct it"]


def test_a_value_that_cannot_be_cut_is_refused() -> None:
    class Module(GRPO):
        def rewards(self, rollout: Rollout) -> list[float]: ...

        def advantages(self, rollout: Rollout, rewards: Any) -> PerSample: ...

    (problem,) = problems(Module())
    assert problem.startswith("`rewards` returns list[float], which cannot be cut by rows: ")


def test_a_type_that_is_not_imported_is_told() -> None:
    class Module(SFT):
        @node
        def a(self, batch: Batch) -> Unknown: ...  # noqa: F821

    assert problems(Module()) == [
        "the types of `a` cannot be read: name 'Unknown' is not defined. Import or correct them"
    ]


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


def test_samples_of_two_rollouts_cannot_be_mixed() -> None:
    class Module(GRPO):
        @node(role="rollout")
        def other(self, batch: Batch) -> Rollout: ...

        def advantages(self, rewards: PerSample, other: Rollout) -> PerSample: ...

    assert problems(Module()) == [
        "`advantages` mixes samples of `rollout` (in `rewards`) and of `other` (in `other`),"
        " whose rows have nothing in common. Read them in nodes of their own"
    ]


def test_one_number_of_another_rollout_may_be_read() -> None:
    class Module(GRPO):
        @node(role="rollout")
        def other(self, batch: Batch) -> Rollout: ...

        @node
        def mean_length(self, other: Rollout) -> Scalar: ...

        def advantages(self, rewards: PerSample, mean_length: Scalar) -> PerSample: ...

    assert Graph.read(Module(), ROLES).nodes["advantages"].space == "rollout"


class DPO:
    @node(role="reference")
    def ref_logprobs(self, batch: Pairs) -> PerSample: ...

    @node(role="actor", type="train")
    def actor_loss(self, batch: Pairs, ref_logprobs: PerSample) -> PerSample: ...


def test_the_readers_of_batch_say_whether_it_is_pairs() -> None:
    class Indifferent(DPO):
        @node
        def a(self, batch: Any) -> PerSample: ...

    assert Graph.read(Indifferent(), ROLES).type_of("batch") is Pairs
    assert Graph.read(SFT(), ROLES).type_of("batch") is Batch


def test_the_readers_of_batch_agree_on_its_type() -> None:
    class Module(DPO):
        @node
        def a(self, batch: Batch) -> PerSample: ...

    (problem,) = problems(Module())
    assert problem.startswith("`a` reads `batch` as Batch, but `ref_logprobs` reads it as Pairs (")
    assert problem.endswith("). Make them agree")


def test_nothing_of_a_pair_is_per_token() -> None:
    class Module(DPO):
        @node
        def a(self, ref_logprobs: PerSample) -> PerToken: ...

        @node(role="actor", type="train")
        def actor_loss(self, batch: Pairs, ref_logprobs: PerSample) -> PerToken: ...

    of_pairs = "returns PerToken of pairs, and a pair has the tokens of two responses"
    assert problems(Module()) == [
        f"`{name}` {of_pairs}. Return one number or vector for each pair, `-> PerSample`"
        for name in ("a", "actor_loss")
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


def test_a_rollout_node_reads_prompts_only() -> None:
    class Module(GRPO):
        @node(role="rollout")
        def again(self, rollout: Rollout) -> Rollout: ...

    assert problems(Module()) == [
        "`again` has role 'rollout' and reads samples of `rollout` (in `rollout`); it may read prompts only"
    ]


def test_a_filter_and_its_ancestors_come_first_and_train_nodes_last() -> None:
    graph = Graph.read(Filtered(), ROLES)
    assert [node.id for node in graph.block] == ["rollout", "rewards", "useful"]
    order = ["rollout", "rewards", "useful", "old_logprobs", "advantages", "actor_loss"]
    assert [node.id for node in graph.order] == order


def test_a_filter_returns_one_bool_a_row() -> None:
    class Module(GRPO):
        @node(type="filter")
        def useful(self, rollout: Rollout) -> PerToken: ...

    assert problems(Module()) == [
        "`useful` is a filter and returns PerToken; it says of each row whether it is kept."
        " Return one bool a row, `-> PerSample`"
    ]


def test_a_filter_does_not_sample() -> None:
    class Module(GRPO):
        @node(role="rollout", type="filter")
        def useful(self, batch: Batch) -> PerSample: ...

    assert problems(Module()) == [
        "`useful` is a filter and has role 'rollout', and what samples cannot choose."
        " Sample in a node of its own, and read that"
    ]


def test_two_filters_are_to_be_one() -> None:
    class Module(Filtered):
        @node(type="filter")
        def short(self, rollout: Rollout) -> PerSample: ...

    (problem,) = problems(Module())
    assert problem.startswith("`short` is a second filter beside `useful` (")
    assert problem.endswith("), and rows are chosen once. Combine the two into one")


def test_a_filter_reads_rows() -> None:
    class Numbers(GRPO):
        @node
        def mean_reward(self, rewards: PerSample) -> Scalar: ...

        @node(type="filter")
        def useful(self, mean_reward: Scalar) -> PerSample: ...

    class Nothing(GRPO):
        @node(type="filter")
        def useful(self) -> PerSample: ...

    class Rows(GRPO):
        @node
        def made_up(self) -> PerSample: ...

        @node(type="filter")
        def useful(self, made_up: PerSample) -> PerSample: ...

    told = "`useful` is a filter and reads neither prompts nor samples. Read the rows that it chooses from"
    assert problems(Numbers()) == [told]
    assert problems(Nothing()) == [told]
    assert problems(Rows()) == [told]


def test_a_number_of_one_draw_is_not_read_after_the_filter() -> None:
    class Module(Filtered):
        @node
        def mean_reward(self, rewards: PerSample) -> Scalar: ...

        def useful(self, rewards: PerSample, mean_reward: Scalar) -> PerSample: ...

        def advantages(self, rewards: PerSample, mean_reward: Scalar) -> PerSample: ...

    (problem,) = problems(Module())
    assert problem.startswith("`advantages` reads `mean_reward` (")
    assert problem.endswith(
        "), a Scalar of one draw, and the rows that pass the filter `useful` are of several."
        " Compute it in a node that comes after the filter"
    )


def test_a_filter_does_not_read_a_loss() -> None:
    class Module(GRPO):
        @node(type="filter")
        def useful(self, rollout: Rollout, actor_loss: PerToken) -> PerSample: ...

    (problem,) = problems(Module())
    assert problem.startswith("`useful` reads `actor_loss`, a train node (")


def test_misspelt_marks_are_told() -> None:
    class Module(SFT):
        @node(role="actor", type="trian")
        def a(self, batch: Batch) -> PerToken: ...

        @node(rows="batch")
        def b(self, batch: Batch) -> PerSample: ...

    assert problems(Module()) == [
        "`type='trian'` of `a` is not 'train' or 'filter'. Did you mean \"train\"?",
        "`rows='batch'` of `b` has no effect: only rollout nodes make rows, and its role is None. Remove it",
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


def test_an_attribute_that_hides_a_node_is_told() -> None:
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


def test_two_nodes_of_one_name_in_one_class_are_told() -> None:
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


def test_a_module_without_nodes_is_told() -> None:
    with pytest.raises(UserError, match=r"`object` has no node. Mark the steps of the algorithm with `@node`"):
        Graph.read(object(), ROLES)
