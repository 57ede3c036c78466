"""From an entry to a node: what is called with what, and what cannot be."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from rlflow.functional import group_normalized_advantages
from rlflow.run.prepare import read_graph
from rlflow.values.batch import Pairs
from rlflow.values.cuts import PerSample, Scalar
from tests.workflow.configs import FUNCTIONAL, STEPS, graph_of, module_of, refusal


def test_a_function_is_called_with_values_fields_and_parameters(tmp_path: Path) -> None:
    module = module_of(
        tmp_path, f"- id: longest\n  dependencies: {{lengths: rollout.lengths}}\n  call: {STEPS}.longest"
    )
    graph = read_graph(module)
    assert (graph.nodes["longest"].reads, graph.nodes["longest"].returns) == (("rollout",), Scalar)

    class Rows:
        group = torch.tensor([4, 4, 9, 9])

    rewards = torch.tensor([1.0, 0.0, 2.0, 6.0])
    made = module.advantages(rollout=Rows(), rewards=rewards)  # type: ignore[attr-defined]
    assert torch.equal(made, group_normalized_advantages(rewards, Rows.group, True))


def test_without_dependencies_parameters_say_by_name_what_is_read(tmp_path: Path) -> None:
    node = graph_of(tmp_path, f"- {{id: shorter, call: {STEPS}.shortened}}").nodes["shorter"]
    assert node.reads == ("rollout", "rewards")  # `weight` and `floor` keep their defaults


def test_a_parameter_gets_the_type_of_the_signature(tmp_path: Path) -> None:
    module = module_of(tmp_path, "- {id: actor_loss, parameters: {importance: {level: geometric}, dual_clip: '3'}}")
    read_graph(module)
    bound = module.actor_loss.bound  # type: ignore[attr-defined]
    assert (bound["importance"].level, bound["dual_clip"]) == ("geometric", 3.0)


def test_a_function_gets_a_model_and_the_module_by_name(tmp_path: Path) -> None:
    module = module_of(
        tmp_path,
        f"""
        - {{id: centred, call: {STEPS}.centred}}
        - {{id: actor_loss, role: actor, type: train, call: {STEPS}.likelihood_loss}}
        """,
    )
    read_graph(module)
    assert module.centred.bound["self"] is module  # type: ignore[attr-defined]
    assert module.actor_loss.bound["actor"] is module.actor  # type: ignore[attr-defined]


def test_a_method_of_another_algorithm_serves_as_a_node(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, "- {id: advantages, call: rlflow.algorithms.RLOO.advantages}")
    assert graph.nodes["advantages"].returns == PerSample


def test_a_value_is_whitened_and_logged(tmp_path: Path) -> None:
    graph = graph_of(
        tmp_path,
        """
        - {id: white, call: whiten, dependencies: {x: rewards}, returns: PerSample}
        - {id: told, call: log, dependencies: {x: white}, parameters: {name: reward/white}}
        """,
    )
    assert not graph.nodes["told"].makes_value


def test_a_node_that_reads_a_side_of_batch_makes_it_pairs(tmp_path: Path) -> None:
    others = "".join(f"- {{id: {name}, remove: true}}\n" for name in ("rollout", "rewards", "advantages"))
    graph = graph_of(
        tmp_path,
        others
        + f"""
- id: actor_loss
  role: actor
  type: train
  call: {STEPS}.preferred
  dependencies: {{chosen: batch.chosen}}
  parameters: {{beta: 0.1}}
""",
    )
    assert graph.type_of("batch") is Pairs


def test_a_module_with_its_nodes_can_be_sent_to_another_process(tmp_path: Path) -> None:
    module = module_of(tmp_path)
    read_graph(module)
    copy = pickle.loads(pickle.dumps(module))
    assert copy.actor_loss.bound["actor"] is copy.actor
    assert read_graph(copy) == read_graph(module)


GROUP = "call: FUNCTIONAL, returns: PerSample, dependencies:"
REFUSALS = [  # what is written of a node, and what is said of it, both from where they differ
    (
        "x, call: reward_fnction",
        'calls reward_fnction, and Workflow has no method reward_fnction. Did you mean "reward_function"?',
    ),
    (
        "x, role: actor, call: actor.logprob",
        'calls actor.logprob, and CausalLM has no method logprob. Did you mean "logprobs"?',
    ),
    (
        "x, call: actr.logprobs",
        'calls actr.logprobs, and there is neither a model nor a module actr. Did you mean "actor"?',
    ),
    (
        "x, call: rlflow.functional.kl_estimat",
        'calls rlflow.functional.kl_estimat, but rlflow.functional has no kl_estimat. Did you mean "kl_estimate"?',
    ),
    ("x, call: STEPS.constant", "calls STEPS.constant, and that is 3, no function. Name one"),
    ("x, call: torch.neg", "calls torch.neg, whose parameters cannot be read ("),
    ("x, call: STEPS.starred", "calls STEPS.starred, whose parameter `values` is variadic positional, and"),
    (
        "x, GROUP {rewards: rewards, group: rollout.grup}",
        'reads `rollout.grup`, and Rollout has no such field. Did you mean "group"?',
    ),
    (
        "x, GROUP {rewards: rewards.mean, group: rollout.group}",
        "reads `rewards.mean`, and PerSample has no such field.",
    ),
    (
        "x, GROUP {rewards: rewrds, group: rollout.group}",
        'reads `rewrds`, which no node makes. Did you mean "rewards"?',
    ),
    (
        "x, GROUP [rewards]",
        "calls FUNCTIONAL, which needs `group`, and neither `dependencies` nor `parameters` give it.",
    ),
    (
        "x, call: STEPS.shortened, dependencies: [rewards, rollout, reward]",
        'has `reward` in its `dependencies`, and STEPS.shortened takes no such parameter. Did you mean "rewards"?',
    ),
    (
        "x, call: STEPS.shortened, parameters: {weigt: 3}",
        'has `weigt` in its `parameters`, and STEPS.shortened takes no such parameter. Did you mean "weight"?',
    ),
    (
        "x, call: STEPS.shortened, dependencies: [rollout, rewards], parameters: {rollout: 3}",
        "has `rollout` in its `dependencies` and in its `parameters`. Leave one",
    ),
    (
        "x, call: STEPS.shortened, parameters: {weight: much}",
        "has `parameters` that do not fit STEPS.shortened: `weight` is 'much'; give a number",
    ),
    (
        "x, call: STEPS.shortened, parameters: {rewards: 3}",
        "has `rewards` in its `parameters`, and it is a PerSample, which nodes make. Write under `dependencies`",
    ),
    (
        "actor_loss, parameters: {importance: {levl: token}}",
        "has `parameters` that do not fit rlflow.workflow.policy_loss: `importance.levl` ('token') is no known key."
        ' Did you mean "level"?',
    ),
    (
        "actor_loss, parameters: {kl_kind: k7}",
        "has `parameters` that do not fit rlflow.workflow.policy_loss: `kl_kind` is 'k7'; give one of 'k1',",
    ),
    (
        "x, call: STEPS.shortened, dependencies: {rewards: rewards, rollout: rewards}",
        "reads `rewards` as Rollout, but `rewards` returns PerSample (",
    ),
    (
        "x, call: STEPS.squared, dependencies: {x: rollout.logprobs}",
        "reads `rollout.logprobs` as PerSample, but it is PerToken. Correct one",
    ),
    (
        "x, call: STEPS.squared, dependencies: {x: rollout}",
        "reads `rollout` as PerSample, but `rollout` returns Rollout (",
    ),
    (
        "x, role: actor, call: actor.logprobs, dependencies: {rows: rewards}",
        "reads `rewards` as Scorable, but `rewards` returns PerSample (",
    ),
    (
        "x, call: actor.logprobs, dependencies: {rows: rollout}",
        "calls the model `actor` and has no role, so its rows may lie elsewhere. Write `role: actor`",
    ),
    ("x, call: generate", "calls generate, and is not marked to. Write `generates: actor`, or"),
    (
        "x, role: actr, call: STEPS.shortened",
        "has role 'actr', which names no model handle of the module. Did you mean \"actor\"?",
    ),
    (
        "x, call: FUNCTIONAL, dependencies: {rewards: rewards, group: rollout.group}",
        "calls FUNCTIONAL, which returns a Tensor, not saying how it is cut by rows."
        " Add `returns: PerSample`, `PerToken` or `Scalar`",
    ),
    (
        "x, call: STEPS.unsaid, dependencies: [rewards]",
        "calls STEPS.unsaid, which returns something that does not say how it is cut by rows.",
    ),
    (
        "x, call: STEPS.shortened, returns: PerToken",
        "has `returns: PerToken`, and STEPS.shortened returns PerSample. Leave it out",
    ),
    (
        "x, call: STEPS.unsaid, dependencies: [rewards], returns: PerSampl",
        'has `returns: PerSampl`, which is no way to cut a value. Did you mean "PerSample"?',
    ),
    (
        "rewards, call: STEPS.shortened, dependencies: {rollout: rollout, rewards: advantages}",
        "waits for itself: `rewards` -> `advantages` -> `rewards`. Break the cycle",
    ),
    (
        "x, call: STEPS.unsaid, dependencies: {rewards: actor.logprobs}, returns: PerSample",
        "depends on `actor.logprobs`, and `actor` is a model. Call `actor.logprobs` in a node of its own",
    ),
    ("log, call: STEPS.shortened", "is the name of something else of Workflow, which it would hide. Rename it"),
    ("actor, call: STEPS.shortened", "is the name of something else of Workflow, which it would hide. Rename it"),
    ("my-node, call: STEPS.shortened", "is no name that a parameter can have. Write letters, digits and _"),
]


@pytest.mark.parametrize(("node", "wrong"), REFUSALS, ids=[node for node, _ in REFUSALS])
def test_a_node_that_cannot_be_is_told_in_one_line(node: str, wrong: str, tmp_path: Path) -> None:
    found = refusal(tmp_path, f"- {{id: {_full(node)}}}")
    assert found.startswith(f"1.yaml:2: `{node.partition(',')[0]}` {_full(wrong)}")
    assert "\n" not in found


def test_a_type_that_does_not_exist_is_told(tmp_path: Path) -> None:
    wrong = refusal(tmp_path, f"- {{id: x, role: actor, type: trian, call: {STEPS}.shortened}}")
    assert wrong == "1.yaml:2: `type='trian'` of `x` is not 'train' or 'filter'. Did you mean \"train\"?"


def test_what_reads_nothing_of_value_is_told(tmp_path: Path) -> None:
    wrong = refusal(
        tmp_path,
        f"""
        - {{id: told, call: log, dependencies: {{x: rewards}}, parameters: {{name: reward/told}}}}
        - {{id: x, call: {STEPS}.unsaid, dependencies: {{rewards: told}}, returns: PerSample}}
        """,
    )
    assert wrong.startswith("1.yaml:3: `x` reads `told`, a node that returns None (")


@pytest.mark.parametrize(
    ("model", "wrong"),
    [
        ("{log: MODEL}", "`models.log` is given, and `log` of Workflow is something else; give the model another name"),
        ("{rollout: MODEL}", "`models.rollout` is given, and that is no name for a model; give the model another name"),
    ],
)
def test_a_model_that_cannot_be_is_told(model: str, wrong: str, tmp_path: Path) -> None:
    plain = "{class_path: rlflow.CausalLM, init_args: {model: tiny}}"
    given = model.replace("MODEL", plain)
    assert refusal(tmp_path, options=("--models", given)).startswith(wrong)


def _full(text: str) -> str:
    return text.replace("GROUP", GROUP).replace("STEPS", STEPS).replace("FUNCTIONAL", FUNCTIONAL)
