"""Nodes in configs and options: what is written of them, their arguments when called, and what is refused."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlflow.cli import main
from rlflow.commands.fit import read_fit
from rlflow.dag.node import NodeConfig
from rlflow.errors import UserError
from rlflow.functional import KL, Clip, Importance, group_normalized_advantages
from rlflow.run.prepare import read_graph
from rlflow.values.batch import Pairs
from rlflow.values.column_kinds import PerSample, Scalar
from rlflow.workflow import Workflow, policy_loss
from tests.workflow.configs import FUNCTIONAL, GRPO, STEPS, WORKFLOW, graph_of, module_of, refusal

BREVITY = f"rewards: {{call: {STEPS}.shortened, inputs: {{rewards: scores}}}}"
SCORES = "scores: reward_function"


def test_parameters_say_by_their_names_what_is_read(tmp_path: Path) -> None:
    node = graph_of(tmp_path, f"shorter: {STEPS}.shortened").nodes["shorter"]
    assert node.reads == ("rollout", "rewards")  # `weight` and `floor` keep their defaults
    assert node.place.startswith("tests/workflow/steps.py:")


def test_inputs_are_values_and_fields_of_other_names(tmp_path: Path) -> None:
    module = module_of(tmp_path, f"longest: {{call: {STEPS}.longest, inputs: {{lengths: rollout.lengths}}}}")
    graph = read_graph(module)
    assert (graph.nodes["longest"].reads, graph.nodes["longest"].returns) == (("rollout",), Scalar)

    class Rows:
        group = torch.tensor([4, 4, 9, 9])

    rewards = torch.tensor([1.0, 0.0, 2.0, 6.0])
    made = module.advantages(rollout=Rows(), rewards=rewards)  # type: ignore[attr-defined]
    assert torch.equal(made, group_normalized_advantages(rewards, Rows.group, True))


def test_a_setting_gets_the_type_of_the_signature(tmp_path: Path) -> None:
    module = module_of(tmp_path, "actor_loss: {settings: {importance: {level: geometric}, entropy_coef: '3'}}")
    read_graph(module)
    settings = module.actor_loss.settings  # type: ignore[attr-defined]
    assert settings["importance"] == Importance(level="geometric")
    assert settings["entropy_coef"] == 3.0
    assert settings["clip"] == Clip(0.2, 0.2)  # as the config before has it


def test_a_function_that_asks_for_self_gets_the_module(tmp_path: Path) -> None:
    module = module_of(tmp_path, f"centred: {STEPS}.centred")
    read_graph(module)
    assert module.centred.settings["self"] is module  # type: ignore[attr-defined]


def test_a_function_s_mark_says_role_and_type(tmp_path: Path) -> None:
    node = graph_of(tmp_path, f"actor_loss: {STEPS}.likelihood_loss").nodes["actor_loss"]
    assert (node.role, node.kind) == ("actor", "train")


def test_a_model_s_method_has_the_model_as_its_role(tmp_path: Path) -> None:
    node = graph_of(tmp_path, "old_logprobs: {call: actor.logprobs, inputs: {rows: rollout}}").nodes["old_logprobs"]
    assert (node.role, node.kind) == ("actor", "model_inference")


def test_a_method_of_another_algorithm_serves_as_a_node(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, "advantages: rlflow.algorithms.RLOO.advantages")
    assert graph.nodes["advantages"].returns == PerSample


def test_a_value_is_whitened_and_logged(tmp_path: Path) -> None:
    graph = graph_of(
        tmp_path,
        """
        white: {call: whiten, inputs: {x: rewards}, returns: PerSample}
        logged: {call: log, inputs: {value: white}, settings: {name: reward/white}}
        """,
    )
    assert not graph.nodes["logged"].makes_value


def test_a_node_that_reads_a_side_of_batch_makes_it_pairs(tmp_path: Path) -> None:
    loss = f"{{call: {STEPS}.preferred, inputs: {{chosen: batch.chosen}}, settings: {{beta: 1}}}}"
    module = module_of(tmp_path, f"actor_loss: {loss}")
    module.config_nodes = {"actor_loss": replace(module.config_nodes["actor_loss"], role="actor", type="train")}
    assert read_graph(module).type_of("batch") is Pairs


def test_a_module_with_its_nodes_can_be_sent_to_another_process(tmp_path: Path) -> None:
    module = module_of(tmp_path)
    read_graph(module)
    copy = pickle.loads(pickle.dumps(module))
    assert copy.actor_loss.settings["self"] is copy
    assert read_graph(copy) == read_graph(module)


def test_reading_the_graph_again_gives_the_same(tmp_path: Path) -> None:
    module = module_of(tmp_path, "advantages: rlflow.algorithms.RLOO.advantages")
    assert read_graph(module) == read_graph(module)


def test_a_later_config_replaces_a_node_in_its_place_and_adds_others_behind(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, f"{SCORES}\n{BREVITY}")
    assert list(graph.nodes) == ["rollout", "rewards", "advantages", "actor_loss", "scores"]
    assert graph.nodes["rewards"].reads == ("rollout", "scores")


def test_a_path_in_a_later_config_leaves_nothing_of_the_node_before(tmp_path: Path) -> None:
    module = module_of(tmp_path, f"advantages: {STEPS}.centred")
    assert module.config_nodes["advantages"] == f"{STEPS}.centred"


def test_a_call_in_a_later_config_leaves_nothing_but_the_place_of_the_node_before(tmp_path: Path) -> None:
    module = module_of(tmp_path, f"advantages: {{call: {STEPS}.shortened, settings: {{weight: 2}}}}")
    assert module.config_nodes["advantages"] == NodeConfig(f"{STEPS}.shortened", settings={"weight": 2})
    assert list(module.config_nodes) == ["rollout", "rewards", "advantages", "actor_loss"]


def test_an_option_changes_a_setting(tmp_path: Path) -> None:
    module = module_of(tmp_path, options=("--nodes.actor_loss.settings.clip.high", "0.28"))
    read_graph(module)
    assert module.actor_loss.settings["clip"] == Clip(0.2, 0.28)  # type: ignore[attr-defined]


def test_a_node_of_an_algorithm_is_replaced_and_keeps_its_mark_and_place(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, "actor_loss: rlflow.workflow.policy_loss", on=GRPO)
    assert (graph.nodes["actor_loss"].role, graph.nodes["actor_loss"].kind) == ("actor", "train")
    assert [node.id for node in graph.order] == ["rollout", "rewards", "advantages", "actor_loss"]


def test_a_function_without_a_mark_takes_that_of_the_node_it_replaces(tmp_path: Path) -> None:
    loss = f"actor_loss: {{call: {STEPS}.squared, inputs: {{x: advantages}}}}"
    problem = refusal(tmp_path, loss, on=GRPO)
    assert "`actor_loss` needs one value whose `loss_mask` masks its loss" in problem  # it is a train node still


def test_a_node_is_added_to_an_algorithm_and_its_optional_readers_read_it(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, "ref_logprobs: {call: reference.logprobs, inputs: {rows: rollout}}", on=GRPO)
    assert "ref_logprobs" in graph.nodes["actor_loss"].reads
    assert "reference" in graph.roles()


def test_a_node_of_an_algorithm_is_removed(tmp_path: Path) -> None:
    options = ("--module.kl.coef", "0.1")
    assert "ref_logprobs" in graph_of(tmp_path, on=GRPO, options=options).nodes
    assert "ref_logprobs" not in graph_of(tmp_path, "ref_logprobs: null", on=GRPO, options=options).nodes


def test_models_of_an_earlier_config_and_of_a_later_one_are_both_there(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("models: {teacher: {class_path: rlflow.CausalLM, init_args: {model: tiny}}}")
    module = read_fit(["--config", str(WORKFLOW), "--config", str(tmp_path / "more.yaml")]).module
    assert list(module.config_models) == ["actor", "teacher"]


def test_a_printed_config_reads_back_as_the_same_workflow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "more.yaml").write_text(
        f"nodes:\n  {SCORES}\n  {BREVITY}\n  actor_loss: {{settings: {{importance: null}}}}\n"
    )
    options = ["--nodes.actor_loss.settings.clip.high", "0.3", "--models.actor.init_args.optimizer.lr", "0.5"]
    arguments = ["--config", str(WORKFLOW), "--config", str(tmp_path / "more.yaml"), *options]
    with pytest.raises(SystemExit):
        main(["fit", *arguments, "--print_config"])
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    again, first = read_fit(["--config", str(tmp_path / "printed.yaml")]), read_fit(arguments)
    assert again.config == first.config
    assert list(again.module.config_nodes.items()) == list(first.module.config_nodes.items())  # in the same order
    assert read_graph(again.module).order == read_graph(first.module).order


REFUSALS = [  # what is written, and what is said of it
    ("x: reward_fnction", "`nodes.x` calls reward_fnction, and Workflow has no method reward_fnction. Did you mean"),
    ("x: actor.logprob", "`nodes.x` calls actor.logprob, and CausalLM has no method logprob. Did you mean"),
    ("x: actr.logprobs", '`nodes.x` calls actr.logprobs, but there is no module actr. Did you mean "actor"?'),
    ("x: rlflow.functional.kl_estimat", "`nodes.x` calls rlflow.functional.kl_estimat, but rlflow.functional has no"),
    ("x: STEPS.constant", "`nodes.x` calls STEPS.constant, and that is 3, no function of Python; name one"),
    ("x: torch.neg", "`nodes.x` calls torch.neg, and that is <built-in"),
    ("x: {call: STEPS.squared, inputs: {y: rewards}}", "`nodes.x` calls STEPS.squared, which has no parameter y."),
    ("x: {call: STEPS.shortened, settings: {weigt: 3}}", 'which has no parameter weigt. Did you mean "weight"?'),
    ("x: {call: STEPS.shortened, settings: {weight: much}}", '`nodes.x.settings`: Parser key "weight"'),
    ("x: {call: STEPS.shortened, settings: {rewards: 3}}", "`nodes.x.settings`: "),
    ("actor_loss: {settings: {clip: {lwo: 0.1}}}", "`nodes.actor_loss.settings`: "),
    ("x: {cal: mean}", "`nodes.x.cal` ('mean') is not a known key. Did you mean \"call\"?"),
    ("x: {role: actor}", "`nodes.x.call` is missing; set it"),
    ("x: 3", "`nodes.x` is 3; give"),
    (
        "x: {call: STEPS.unsaid, returns: PerSampl}",
        "`nodes.x.returns` is 'PerSampl'; give one of 'PerSample', 'PerToken'",
    ),
    ("actor_loss: {type: trian}", "`nodes.actor_loss.type` is 'trian'; give one of 'train', 'filter'"),
    ("kl_penalty: null", "`nodes.kl_penalty` is null, and Workflow has no node of that name to remove."),
    ("log: STEPS.shortened", "`nodes.log` has the name of something else of Workflow; rename it"),
    ("actor: STEPS.shortened", "`nodes.actor` has the name of something else of Workflow; rename it"),
    (
        "my-node: STEPS.shortened",
        "`nodes.my-node` is not a name that a parameter can have; write letters, digits and _",
    ),
    ("x: STEPS.starred", "parameter `*values` of `x` is variadic positional, and values are passed by name."),
    ("x: STEPS.squared", "`x` waits for itself: `x` -> `x`. Break the cycle"),
    (
        "x: {call: STEPS.squared, inputs: {x: rewrds}}",
        '`x` reads `rewrds`, which no node makes. Did you mean "rewards"?',
    ),
    ("x: {call: STEPS.squared, inputs: {x: rollout.grup}}", "`x` reads `rollout.grup`, and Rollout has no such field."),
    (
        "x: {call: STEPS.squared, inputs: {x: rewards.mean}}",
        "`x` reads `rewards.mean`, and PerSample has no such field.",
    ),
    (
        "x: {call: STEPS.squared, inputs: {x: rollout.logprobs}}",
        "`x` reads `rollout.logprobs` as PerSample, but it is PerT",
    ),
    (
        "x: {call: STEPS.squared, inputs: {x: rollout}}",
        "`x` reads `rollout` as PerSample, but `rollout` returns Rollout (",
    ),
    ("x: {call: STEPS.squared, inputs: {x: rewards}, role: actr}", "`x` has role 'actr', which names no model handle"),
    ("x: {call: FUNCTIONAL, inputs: {group: rollout.group}}", "`x` returns Tensor, which cannot be cut by rows"),
    ("x: STEPS.unsaid", "`x` has no return type, which says how its value is cut by rows."),
    (
        "rewards: {call: STEPS.shortened, inputs: {rewards: advantages}}",
        "waits for itself: `rewards` -> `advantages` ->",
    ),
]


@pytest.mark.parametrize(("node", "wrong"), REFUSALS, ids=[node for node, _ in REFUSALS])
def test_a_node_that_cannot_be_is_refused_in_one_line(node: str, wrong: str, tmp_path: Path) -> None:
    found = refusal(tmp_path, _full(node))
    assert _full(wrong) in found


def test_a_node_of_a_class_that_is_misspelt_is_not_removed(tmp_path: Path) -> None:
    found = refusal(tmp_path, "kl_penlty: null", on=GRPO)
    assert found.endswith('GRPO has no node of that name to remove. Did you mean "kl_penalty"?')


@pytest.mark.parametrize(
    ("model", "wrong"),
    [
        ("{log: MODEL}", "`models.log` is given, and `log` of Workflow is something else; give the model another name"),
        (
            "{state: MODEL}",
            "a model of Workflow is called `state`, the name of another file of checkpoints",
        ),
        (
            "{rollout: MODEL}",
            "`models.rollout` is given, and that is not a name for a model; give the model another name",
        ),
    ],
)
def test_a_model_that_cannot_be_is_refused(model: str, wrong: str, tmp_path: Path) -> None:
    plain = "{class_path: rlflow.CausalLM, init_args: {model: tiny}}"
    given = model.replace("MODEL", plain)
    assert refusal(tmp_path, options=("--models", given)).startswith(wrong)


def _full(text: str) -> str:
    return text.replace("STEPS", STEPS).replace("FUNCTIONAL", FUNCTIONAL)


@pytest.mark.parametrize("kl", [KL(coef=0.1, in_reward=True), KL(coef=0.1, target=0.05, in_reward=True)])
def test_kl_of_the_reward_is_refused_in_the_loss_of_a_workflow(kl: KL) -> None:
    with pytest.raises(UserError, match="`kl` of `policy_loss` has `in_reward` or `target`"):
        policy_loss(Workflow(), SimpleNamespace(loss_mask=None), torch.zeros(1), kl=kl)  # type: ignore[arg-type]
