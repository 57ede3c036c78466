"""The examples of the documentation are run: algorithms, configs, pictures; and each metric is documented."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from rlflow import Callback, CausalLM, Optimizer, RLModule, Trainer, algorithms, rewards
from rlflow.algorithms import GRPO
from rlflow.algorithms.grpo import GroupRelative
from rlflow.callbacks.hooks import HOOKS
from rlflow.cli import main
from rlflow.commands.fit import read_fit
from rlflow.controller.gap import GAP, LARGEST_GAP
from rlflow.data.prompts import PromptData
from rlflow.dotted_path import object_at
from rlflow.rewards import ExactMatch
from rlflow.run.prepare import read_graph
from tests.controller.runs import Fit, OddCharacters, fit
from tests.data.list_source import Listed
from tests.own_folder import command

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def block_with(page: str, text: str) -> str:
    """The page's block of Python that has this text."""
    (found,) = (block for block in blocks(page, "python") if text in block)
    return found


def trained(folder: Path, page: str) -> Path:
    """The folder with the page's first algorithm and its config, written as the page says, and trained for a step."""
    algorithm = next(block for block in blocks(page, "python") if "\nclass " in block)
    (folder / "my_algorithm.py").write_text(algorithm, encoding="utf-8")
    (folder / "my.yaml").write_text(blocks(page, "yaml")[0], encoding="utf-8")
    command(folder, "fit", "--config", "my.yaml", "--trainer.max_steps", "1")
    return folder


def imported(code: str, name: str, folder: Path) -> ModuleType:
    """`code` as a module of that name, from a file, since a graph names the lines of its nodes."""
    path = folder / f"{name}.py"
    path.write_text(code, encoding="utf-8")
    return loaded(path, name)


def loaded(path: Path, name: str) -> ModuleType:
    """A file as a module of that name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


counting = loaded(ROOT / "benchmarks" / "line_counts.py", "counting_lines")
drawing = loaded(DOCS / "pictures" / "draw.py", "drawing_graphs")


def test_the_page_long_algorithm_is_a_graph(tmp_path: Path) -> None:
    algorithm = imported(blocks("algorithm.md", "python")[0], "shown_reinforce", tmp_path)
    nodes = read_graph(algorithm.Reinforce(CausalLM("tiny"), ExactMatch())).order
    assert [node.id for node in nodes] == ["rollout", "rewards", "advantages", "actor_loss"]


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the README's algorithm after one step."""
    return trained(tmp_path_factory.mktemp("readme"), "../README.md")


def test_the_algorithm_of_the_readme_trains_from_a_users_own_folder(readme: Path) -> None:
    assert json.loads((readme / "runs/short/summary.json").read_text(encoding="utf-8"))["steps"] == 1


def test_what_the_algorithm_of_the_readme_logs_is_recorded(readme: Path) -> None:
    (line,) = (readme / "runs/short/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = json.loads(line)
    assert logged["reward/price"] == pytest.approx(0.02 * logged["rollout/length"], rel=1e-6)


def test_the_page_long_algorithm_trains_from_a_users_own_folder(tmp_path: Path) -> None:
    summary = trained(tmp_path, "algorithm.md") / "runs/reinforce/summary.json"
    assert json.loads(summary.read_text(encoding="utf-8"))["steps"] == 1


def test_the_recipe_for_users_of_trl_trains_with_a_reward_in_its_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = imported(blocks("coming_from.md", "python")[0], "shown_from_trl", tmp_path).trainer
    logged = [json.loads(line) for line in Path("runs/from_trl/metrics.jsonl").read_text().splitlines()]
    assert len(logged) == trainer.settings.max_steps == 2
    assert all(-16 * 16 < line["reward/mean"] < 0 for line in logged)  # characters of at most 16 tokens


def test_the_manifest_for_kubernetes_starts_the_ranks_that_the_config_has() -> None:
    service, job = yaml.safe_load_all(blocks("nodes.md", "yaml")[0])
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = dict(each[2:].split("=", 1) for each in container["command"] + container["args"] if "=" in each)
    machines, devices = job["spec"]["completions"], container["resources"]["limits"]["nvidia.com/gpu"]
    assert machines == job["spec"]["parallelism"] == int(options["nnodes"]) == int(options["trainer.num_nodes"])
    assert devices == int(options["nproc-per-node"]) == int(options["trainer.devices"])
    assert options["rdzv-endpoint"].startswith(f"{job['metadata']['name']}-0.{pod['subdomain']}:")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_recipe_for_users_of_verl_is_read_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(blocks("coming_from.md", "yaml")[0], encoding="utf-8")
    found = read_fit(["--config", str(tmp_path / "my.yaml")])
    assert (found.module.group_size, found.module.actor.samples_per_update) == (5, 256 * 5)
    assert found.trainer.settings.world_size == 8


def test_the_workflow_and_its_variation_train_from_a_users_own_folder(tmp_path: Path) -> None:
    (tmp_path / "my_steps.py").write_text(blocks("workflow.md", "python")[0], encoding="utf-8")
    for name, text in zip(("my.yaml", "variation.yaml"), blocks("workflow.md", "yaml"), strict=True):
        (tmp_path / name).write_text(text, encoding="utf-8")
    command(tmp_path, "fit", "--config", "my.yaml", "--config", "variation.yaml", "--trainer.max_steps", "1")
    (line,) = (tmp_path / "runs/workflow/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = json.loads(line)
    assert logged["rollout/tokens_each"] == logged["rollout/length"]
    assert logged["actor/advantage"] == pytest.approx(0, abs=1e-6)


def test_the_python_of_the_quickstart_says_what_its_yaml_says(tmp_path: Path) -> None:
    shown = imported(block_with("quickstart.md", "Trainer"), "shown_quickstart", tmp_path)
    configured = read_fit(["--config", str(ROOT / "configs" / "quickstart_grpo.yaml")])
    assert plain(shown.module) == plain(configured.module)
    assert plain(shown.data) == plain(configured.data)
    theirs, ours = plain(configured.trainer), plain(shown.trainer)
    for said_by_one in ("resolved_config", "strategy", "run_dir", "accelerator"):  # a folder of its own, and defaults
        del theirs[said_by_one], ours[said_by_one]
    assert ours == theirs


@pytest.mark.parametrize(
    ("name", "base", "differs"), [("LitePPO", GRPO, "advantages"), ("TOPR", GroupRelative, "surrogate")]
)
def test_a_published_variation_differs_from_grpo_in_one_method(
    name: str, base: type, differs: str, tmp_path: Path
) -> None:
    variation = getattr(imported(block_with("algorithm.md", f"class {name}"), f"shown_{name}", tmp_path), name)
    assert variation.__base__ is base
    assert [name for name, value in vars(variation).items() if inspect.isfunction(value) and "__" not in name] == [
        differs
    ]


def test_the_advantages_of_lite_ppo_have_the_group_s_mean_and_the_deviation_of_all(tmp_path: Path) -> None:
    written = imported(block_with("algorithm.md", "class LitePPO"), "shown_lite_ppo", tmp_path)
    module = written.LitePPO(CausalLM("tiny"), ExactMatch())
    module.mean = torch.mean  # of one rank
    rewards = torch.tensor([0.0, 2.0, 4.0, 4.0])  # deviations from their mean 2.5: -2.5, -0.5, 1.5, 1.5; variance 2.75
    advantages = module.advantages(SimpleNamespace(group=torch.tensor([0, 0, 1, 1])), rewards)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0, 0.0, 0.0]) / 2.75**0.5)


def test_the_surrogate_of_topr_weighs_bad_responses_by_their_ratio(tmp_path: Path) -> None:
    written = imported(block_with("algorithm.md", "class TOPR"), "shown_topr", tmp_path)
    module = written.TOPR(CausalLM("tiny"), ExactMatch())
    # ratios of whole responses: exp(-0.5 - 0.25) of the first two, exp(2) of the third, whose second token is padding
    logprobs = torch.tensor([[-0.5, -0.25], [-0.5, -0.25], [2.0, 9.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    advantages = torch.tensor([3.0, -3.0, -2.0], dtype=torch.float64)
    loss = module.surrogate(logprobs, torch.zeros(3, 2).double(), advantages, mask)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    expected = [-3.0, 3.0 * math.exp(-0.75), 2.0]
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64)[:, None].expand(3, 2))


def test_the_curriculum_omits_what_is_always_solved_and_begins_with_the_hardest(tmp_path: Path) -> None:
    (block,) = [block for block in blocks("algorithm.md", "python") if "class Curriculum" in block]
    module = imported(block, "shown_curriculum", tmp_path).Curriculum(CausalLM("tiny"), ExactMatch())
    assert len(counting.code_lines(block)) < 20
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    module.solved.learn(torch.tensor([3, 3, 5, 5, 7, 7]), rewards)  # solved always, half the time, and never
    assert module.choose_prompts(1, torch.tensor([3, 5, 9, 7])).tolist() == [7, 5, 9]


@pytest.mark.parametrize("name", ["SelfDistillation", "Remembers"])
def test_the_examples_of_two_models_and_of_earlier_rows_train(name: str, tmp_path: Path) -> None:
    (block,) = [block for block in blocks("algorithm.md", "python") if f"class {name}(" in block]
    written = getattr(imported(block, f"shown_{name}", tmp_path), name)
    rows = [{"question": f"{i}=", "answer": "x" * i} for i in range(1, 5)]
    sgd = Optimizer("sgd", lr=0.1)
    if name == "Remembers":
        module, response = written(CausalLM("tiny", optimizer=sgd), OddCharacters(), max_response_length=4), None
    else:
        module, response = written(CausalLM("tiny", optimizer=sgd), max_response_length=4), "answer"
    (step,) = fit(Fit(module, PromptData(Listed(rows), None, 4, response=response), tmp_path / "run")).steps
    assert math.isfinite(step["actor/loss"])


def test_the_policy_that_thinks_twice_trains_on_both_of_its_answers(tmp_path: Path) -> None:
    shown = imported(block_with("several_policies.md", "class SecondThoughts"), "shown_second_thoughts", tmp_path)
    actor = CausalLM("tiny", optimizer=Optimizer("sgd", lr=0.1))
    module = shown.SecondThoughts(actor, OddCharacters(), max_response_length=4)
    rows = [{"question": f"{i}="} for i in range(4)]
    (step,) = fit(Fit(module, PromptData(Listed(rows), None, 4), tmp_path / "run")).steps
    assert math.isfinite(step["actor/loss"])
    assert step["draft/tokens"] > 0
    assert step["sync/logprob_gap"] < 1e-5


@pytest.mark.parametrize("name", sorted({*algorithms.__all__} - {"PolicyGradient"}))
def test_every_algorithm_is_shown_with_its_config_and_its_graph(name: str) -> None:
    page = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    assert f"### {name}\n" in page
    section = page.split(f"### {name}\n")[1].split("\n### ")[0]
    (config,) = re.findall(r"`configs/(\w+)\.yaml`", section)
    assert f"class_path: {name}\n" in (ROOT / "configs" / f"{config}.yaml").read_text(encoding="utf-8")
    assert f"<!-- configs/{config}.yaml -->\n```mermaid\n" in section
    (file,) = re.findall(r"`(algorithms/\w+\.py)`", section)
    assert f"class {name}(" in (ROOT / file).read_text(encoding="utf-8")


LOGGING = {"log", "mean", "sum", "number", "largest", "seconds"}  # methods of modules and of Metrics
STANDS_FOR = {  # what a part of a name that is computed may be; `<role>` and the like as the page writes them
    "name": ["reward", "greedy_reward"],
    "part_name": ["<part>"],
    "dataset": ["<dataset>"],
    "criterion": ["<criterion>"],
    "prefix": ["val", "val_greedy", "reward_model"],
    "role": ["<role>"],
    "task.node_id": ["<node>"],
    "node_id": ["rollout"],
    "end": [""],  # a policy's name where there are several
    "node.id": ["rollout"],
    "self._part": ["filter", "rollout"],
    "k": ["<k>"],
    "seat": ["<seat>"],
    "group": ["", "/pg1"],
}


def logged_metrics() -> set[str]:
    """The names that the code gives metrics, those that are partly computed written out."""
    sources = {path for folder in ("rlflow", "algorithms") for path in (ROOT / folder).rglob("*.py")}
    calls = (call for path in sources for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found = {GAP, LARGEST_GAP}
    for call in calls:
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in LOGGING
            and call.args
        ):
            found |= set(names(call.args[0]))
    return found


def names(written: ast.expr) -> list[str]:
    """The name in a first argument, if it is a metric's: it has a slash."""
    if isinstance(written, ast.Constant) and isinstance(written.value, str):
        parts: list[list[str]] = [[written.value]]
    elif isinstance(written, ast.JoinedStr):
        texts = (part.value if isinstance(part, ast.FormattedValue) else part for part in written.values)
        parts = [
            [str(text.value)] if isinstance(text, ast.Constant) else STANDS_FOR[ast.unparse(text)] for text in texts
        ]
    else:
        return []
    return [name for name in map("".join, itertools.product(*parts)) if "/" in name]


def metric_rows() -> list[list[str]]:
    """The cells of the tables of metrics."""
    lines = (DOCS / "metrics.md").read_text(encoding="utf-8").split("## How metrics are reduced")[1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    assert len(rows) > 10
    return rows


def test_every_metric_that_the_code_names_is_explained() -> None:
    explained = {name for row in metric_rows() for name in re.findall(r"`([^`]+)`", row[0])}
    never = {"val_greedy/pass@<k>", "reward_model/reward", "reward_model/length", "reward_model/truncated"}
    never |= {"reward_model/pass@<k>", "reward_model/reward_<seat>", "reward_model/errors"}  # combinations of parts
    never |= {"val_greedy/margin", "val_greedy/loss", "val_greedy/token_accuracy", "reward_model/token_accuracy"}
    assert sorted(logged_metrics() - never - explained) == []


def test_every_metric_has_a_meaning_a_healthy_range_and_what_to_do_outside_it() -> None:
    assert [row[0] for row in metric_rows() if len(row) != 4 or not all(row)] == []


def test_the_variation_keeps_the_graph_of_what_it_varies(tmp_path: Path) -> None:
    variation = imported(block_with("algorithm.md", "class LengthPenalty"), "shown_variation", tmp_path)
    graph = read_graph(variation.LengthPenalty(CausalLM("tiny"), ExactMatch()))
    assert graph.nodes["rewards"].file.endswith("shown_variation.py")
    assert graph.nodes["advantages"].reads == ("rollout", "rewards")


def test_the_page_on_lines_has_what_is_counted_now() -> None:
    page = (DOCS / "maintainers" / "lines.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [\w+. ]+ \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    counted = [counting.count(name) for name in counting.VARIATIONS]
    now = [(lines.algorithm, lines.registration, lines.functional, lines.total) for lines in counted]
    assert [tuple(map(int, row)) for row in rows] == now, "python benchmarks/line_counts.py"


def test_blank_lines_comments_and_docstrings_are_not_lines_of_code() -> None:
    source = [
        '"""Module."""',
        "",
        "import os  # why",
        "# what",
        "def f():",
        '    """Says',
        '    it."""',
        "    return (",
        "os)",
    ]
    assert counting.code_lines("\n".join(source)) == {3, 5, 8, 9}


def test_the_config_of_the_reference_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "shown.yaml").write_text(blocks("configuration.md", "yaml")[0], encoding="utf-8")
    configured = read_fit(["--config", str(tmp_path / "shown.yaml")])
    assert configured.trainer.settings.max_steps == 100
    assert configured.data.prompts_per_step == 32


def test_environments_and_rewards_that_a_config_names_are_in_the_reference() -> None:
    shown = re.findall(r"^::: (rlflow\.(?:rewards|environments)[\w.]+)$", (DOCS / "configuration.md").read_text(), re.M)
    bases = {"Reward", "RewardInput", "RewardLike", "SampleReward", "Scores", "TrainerState", "as_reward"}
    exported = {
        name for name, value in vars(rewards).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert {path.rpartition(".")[2] for path in shown} == exported - bases | {"Environment"}
    assert all(inspect.getdoc(object_at(path, path)) for path in shown)


def test_the_callback_of_the_page_stops_a_run_and_keeps_what_it_counted(tmp_path: Path) -> None:
    callbacks = imported(blocks("callbacks.md", "python")[0], "my_callbacks", tmp_path)
    callback = callbacks.StopsOnLongResponses(tokens=200, steps=2)
    trainer = Trainer(callbacks=[callback])
    stopped = []
    for step, length in enumerate((201.0, 200.0, 201.0, 202.0), start=1):
        callback.on_step_end(trainer, RLModule(), step, {"rollout/length": length})
        stopped.append(trainer.should_stop)
    assert (stopped, callback.state_dict()) == ([False, False, False, True], {"longer": 2})


def test_every_hook_is_on_the_page_of_callbacks() -> None:
    page = (DOCS / "callbacks.md").read_text()
    for name in HOOKS:
        arguments = list(inspect.signature(getattr(Callback, name)).parameters)[3:]
        (row,) = [line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line]
        assert f"| {'`' + ', '.join(arguments) + '` ' if arguments else ''}|" in row, name


def test_every_test_that_verification_names_exists() -> None:
    page = (DOCS / "maintainers" / "verification.md").read_text(encoding="utf-8")
    missing, file = [], ""
    for named_file, name in re.findall(r"`([\w/]+\.py)?(?:::(test_\w+))?`", page):
        file = named_file or file  # `::test_...` is in the file named before it
        path = ROOT / "tests" / file
        if name and not (path.is_file() and re.search(rf"def {name}\b", path.read_text(encoding="utf-8"))):
            missing.append(f"{file}::{name}")
    assert missing == []


def test_no_document_installs_the_other_project() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")]
    told = [page.name for page in pages if re.search(r"pip install rlflow(?!-)", page.read_text(encoding="utf-8"))]
    assert told == []


def test_every_command_that_is_documented_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md"), DOCS / "maintainers/gpu_records.md"]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    named = {target for text in texts for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert named >= {"quickstart", "test", "cuda-env", "pythons"}
    assert named <= {*re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)}


def plain(thing: Any) -> Any:
    """The arguments of the constructor, as plain values by name."""
    if isinstance(thing, list | tuple):
        return [plain(entry) for entry in thing]
    if not type(thing).__module__.startswith("rlflow"):
        return thing
    said = {name: plain(value) for name, value in vars(thing).items() if not name.startswith("_")}
    return {"class": type(thing).__name__, **said}


@pytest.mark.parametrize(
    ("column", "machine"),
    [
        (1, {"like": "h100", "gpus_per_node": 1}),
        (
            2,
            {"like": "a100", "gpus_per_node": 1, "peak_flops": 165e12, "memory": 24e9, "memory_bandwidth": 1.01e12},
        ),
    ],
)
def test_the_recipe_of_a_real_model_has_what_is_predicted(
    column: int, machine: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(machine))
    config = str(ROOT / "configs/qwen3_gsm8k_1gpu.yaml")
    options = ["--hardware", str(tmp_path / "machine.yaml"), "--prompt_tokens", "130", "--response_tokens", "250"]
    main(["simulate", "--config", config, *options])
    told = capsys.readouterr().out
    page = (DOCS / "recipe_gsm8k.md").read_text(encoding="utf-8")
    rows = dict(re.findall(rf"^\| ([^|]+?) \|(?:[^|]+\|){{{column - 1}}} ([^|]+?) \|", page, re.MULTILINE))
    step = rows["time of a step"]
    assert f"\nstep {step}, " in told
    assert rows["time of 100 steps, without validation"] == f"{100 * float(step.split()[0]) / 60:.0f} minutes"
    taken = dict(re.findall(r"^  \* (\w+) +\w+ +\S+ \w+ +(\S+ s) ", told, re.MULTILINE))
    assert rows["time of the generation in a step"] == taken["rollout"]
    assert rows["time of the training in a step"] == taken["actor_loss"]
    generating = rows["memory during generation, most of it for vLLM's cache"]
    training = rows["memory during training"]
    assert f"memory of a rank: {generating} generating, {training} training" in told
    parts = (f"{part} {rows[f'training: {part}, in float32']}" for part in ("weights", "gradients", "optimizer"))
    assert ", ".join(parts) in told
    assert re.search(rf"saving .* {rows['size of a checkpoint']}$", told, re.MULTILINE)
