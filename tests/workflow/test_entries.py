"""What configs and options write of nodes: layers, places, and mistakes of writing."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.cli import main
from rlflow.commands.fit import read_fit
from rlflow.run.prepare import read_graph
from tests.workflow.configs import CONFIGS, STEPS, WORKFLOW, graph_of, module_of, refusal

GRPO = CONFIGS / "grpo.yaml"
BREVITY = f"- {{id: rewards, call: {STEPS}.shortened, dependencies: {{rollout: rollout, rewards: scores}}}}"
SCORES = "- {id: scores, call: reward_function, dependencies: [rollout]}"


def test_a_node_stands_at_the_line_of_the_file_that_writes_it(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, f"# first\n{SCORES}\n\n{BREVITY}")
    assert [graph.nodes[name].line for name in ("scores", "rewards")] == [3, 5]
    assert graph.nodes["scores"].file == str(tmp_path / "1.yaml")
    assert graph.nodes["rollout"].file == str(WORKFLOW)


def test_a_later_config_replaces_a_node_in_its_place_and_adds_others_behind(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, f"{SCORES}\n{BREVITY}")
    assert list(graph.nodes) == ["rollout", "rewards", "advantages", "actor_loss", "scores"]
    assert graph.nodes["rewards"].reads == ("rollout", "scores")


def test_a_call_in_a_later_config_leaves_nothing_of_the_node_before(tmp_path: Path) -> None:
    module = module_of(tmp_path, f"- {{id: actor_loss, role: actor, type: train, call: {STEPS}.likelihood_loss}}")
    (loss,) = (entry for entry in module.config_nodes if entry.id == "actor_loss")
    assert loss.keys == {"role": "actor", "type": "train", "call": f"{STEPS}.likelihood_loss"}


def test_a_later_config_without_a_call_changes_what_it_names(tmp_path: Path) -> None:
    module = module_of(tmp_path, "- {id: actor_loss, parameters: {clip_high: 0.28}}")
    (loss,) = (entry for entry in module.config_nodes if entry.id == "actor_loss")
    assert loss.keys["parameters"] == {"clip_low": 0.2, "clip_high": 0.28}
    assert loss.keys["call"] == "rlflow.workflow.policy_loss"


def test_an_option_changes_a_parameter(tmp_path: Path) -> None:
    module = module_of(tmp_path, options=("--nodes.actor_loss.parameters.clip_high", "0.28"))
    assert module.config_nodes[-1].keys["parameters"] == {"clip_low": 0.2, "clip_high": 0.28}


def test_the_lines_of_two_configs_are_told_apart(tmp_path: Path) -> None:
    wrong = refusal(tmp_path, SCORES, "\n- {id: scores, parameters: {naem: x}}")
    assert wrong.startswith("2.yaml:2: `scores` has `naem` in its `parameters`")


def test_a_node_that_is_removed_can_be_put_back(tmp_path: Path) -> None:
    removed = graph_of(tmp_path, SCORES, "- {id: scores, remove: true}")
    assert "scores" not in removed.nodes
    back = graph_of(tmp_path, SCORES, "- {id: scores, remove: true}", "- {id: scores, remove: false}")
    assert "scores" in back.nodes


def test_a_node_of_an_algorithm_is_replaced_and_keeps_its_mark_and_place(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, f"- {{id: actor_loss, call: {STEPS}.likelihood_loss}}", on=GRPO)
    assert (graph.nodes["actor_loss"].role, graph.nodes["actor_loss"].kind) == ("actor", "train")
    assert graph.nodes["actor_loss"].place.endswith("1.yaml:2")
    assert [node.id for node in graph.order] == ["rollout", "rewards", "advantages", "actor_loss"]


def test_a_node_is_added_to_an_algorithm_and_its_optional_readers_read_it(tmp_path: Path) -> None:
    graph = graph_of(
        tmp_path,
        "- {id: ref_logprobs, role: reference, call: reference.logprobs, dependencies: {rows: rollout}}",
        on=GRPO,
    )
    assert "ref_logprobs" in graph.nodes["actor_loss"].reads
    assert "reference" in graph.roles()


def test_a_node_of_an_algorithm_is_removed(tmp_path: Path) -> None:
    options = ("--module.kl.coef", "0.1")
    assert "ref_logprobs" in graph_of(tmp_path, on=GRPO, options=options).nodes
    assert (
        "ref_logprobs" not in graph_of(tmp_path, "- {id: ref_logprobs, remove: true}", on=GRPO, options=options).nodes
    )


def test_a_model_of_an_earlier_config_stays_beside_that_of_a_later(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("models: {teacher: {class_path: rlflow.CausalLM, init_args: {model: tiny}}}")
    module = read_fit(["--config", str(WORKFLOW), "--config", str(tmp_path / "more.yaml")]).module
    assert list(module.config_models) == ["actor", "teacher"]


def test_reading_the_graph_again_gives_the_same(tmp_path: Path) -> None:
    module = module_of(tmp_path, "- {id: advantages, call: rlflow.algorithms.RLOO.advantages}")
    assert read_graph(module) == read_graph(module)


@pytest.mark.parametrize(
    ("nodes", "wrong"),
    [
        ("- {id: scores, cal: mean}", '2: `scores` has a key `cal`, which is no known one. Did you mean "call"?'),
        ("- id: scores\n  call: mean\n  colour: red", "4: `scores` has a key `colour`, which is no known one. Known"),
        ("- rewards", "2: an entry of `nodes` is 'rewards', without the name of a node. Write `- id: ...`"),
        ("rewards: {call: mean}", "2: `nodes` is {'rewards': {'call': 'mean'}}; write a list, each node as `- id:"),
        ("- {id: scores, call: 3}", "2: `scores` has the `call` 3. Give a dotted path"),
        ("- {id: scores, call: mean, dependencies: [3]}", "2: `scores` has the `dependencies` [3]. Give a list of"),
        (f"{SCORES}\n{SCORES}", "3: `scores` is written before, in 1.yaml:2. Rename or delete one"),
        ("- {id: scores, parameters: {x: 3}}", "2: `scores` has no `call`, the dotted path of the function that"),
        ("- {id: reward, remove: true}", "2: `reward` is removed, and Workflow has no node of that name. Did you"),
    ],
    ids=["misspelt", "unknown", "no id", "no list", "call", "dependencies", "twice", "no call", "not there"],
)
def test_a_mistake_of_writing_is_told_with_its_line(nodes: str, wrong: str, tmp_path: Path) -> None:
    found = refusal(tmp_path, nodes)
    assert found.startswith(f"1.yaml:{wrong}")
    assert "\n" not in found


def test_a_mistake_in_an_option_names_the_option(tmp_path: Path) -> None:
    wrong = refusal(tmp_path, options=("--nodes.actor_loss.parameters.clip_hihg", "0.3"))
    assert wrong.startswith("--nodes.actor_loss.parameters.clip_hihg:1: `actor_loss` has `clip_hihg`")


def test_a_printed_config_reads_back_as_the_same_workflow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "more.yaml").write_text(f"nodes:\n  {SCORES}\n  - {{id: actor_loss, parameters: {{importance: null}}}}")
    options = ["--nodes.actor_loss.parameters.clip_high", "0.3", "--models.actor.init_args.optimizer.lr", "0.5"]
    arguments = ["--config", str(WORKFLOW), "--config", str(tmp_path / "more.yaml"), *options]
    with pytest.raises(SystemExit):
        main(["fit", *arguments, "--print_config"])
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    again, first = read_fit(["--config", str(tmp_path / "printed.yaml")]), read_fit(arguments)
    assert again.config == first.config
    assert [entry.keys for entry in again.module.config_nodes] == [entry.keys for entry in first.module.config_nodes]


def test_a_graph_is_printed_and_drawn_with_the_places_in_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "more.yaml").write_text(f"nodes:\n  {SCORES}\n")
    main(
        ["graph", "--config", str(WORKFLOW), "--config", str(tmp_path / "more.yaml"), "--draw", str(tmp_path / "drawn")]
    )
    assert "more.yaml:2" in capsys.readouterr().out
    assert "more.yaml:2" in (tmp_path / "drawn.svg").read_text()
