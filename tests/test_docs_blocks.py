"""Every block of code of the documents is run or read; one that cannot be is marked in its page, and counted.

Python is imported, YAML is read as a config, each command of the shell is read with its options. A block that is not
run has the line `<!-- not run: the reason -->` above it.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlflow.cli import COMMANDS
from rlflow.commands.configuration import call_configured
from rlflow.commands.fit import read_fit
from rlflow.commands.parser import call
from rlflow.dag.methods import read_methods
from rlflow.errors import UserError, one_line
from rlflow.models.tiny import write_tiny_model
from rlflow.module import RLModule
from tests.own_folder import command, forgotten
from tests.test_docs import DOCS, ROOT, imported

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^(?:<!-- not run: (?P<why>.+) -->\n)?```(?P<language>.*)\n(?P<code>(?:.*\n)*?)```$", re.MULTILINE)
LANGUAGES = {"python", "yaml", "json", "bash", "text", "mermaid"}


@dataclass(frozen=True)
class Block:
    """A block of code in a page; `why` it is not run, if the page says so."""

    page: Path
    line: int
    language: str
    code: str
    why: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        yield Block(page, line, found["language"], found["code"], found["why"])


ALL = [block for page in PAGES for block in blocks(page)]


def run_here(language: str) -> list[Block]:
    return [block for block in ALL if block.language == language and block.why is None]


def test_every_block_has_a_language_that_is_run_or_only_shown() -> None:
    assert [str(block) for block in ALL if block.language not in LANGUAGES] == []
    fences = sum(page.read_text(encoding="utf-8").count("```") for page in PAGES)
    assert fences == 2 * len(ALL)


def test_the_blocks_that_are_not_run_are_these() -> None:
    found = [(block.page.name, block.why.split(";")[0]) for block in ALL if block.why is not None]
    assert sorted(found) == [
        ("configuration.md", "MLflow"),
        ("gpu.md", "GPUs"),
        ("nodes.md", "Kubernetes"),  # its form: test_the_manifest_for_kubernetes_starts_the_ranks_that_the_config_has
        ("nodes.md", "Slurm"),
        ("quickstart.md", "in a new folder"),  # commands/test_init.py runs it
        ("quickstart.md", "the network"),
        ("reliability.md", "Slurm"),
    ]


# Files that configs and commands of the documents name, by the beginnings of the blocks that are in them.
MODULES = {
    "my_agent": ["import json\n\nfrom openai import AsyncOpenAI\n"],
    "my_algorithm": [
        "from rlflow import PerSample, RolloutWithTexts\nfrom rlflow.algorithms import GRPO\n\nPRICE",
        "from rlflow import Batch, CausalLM, PerSample, PerToken",
    ],
    "my_algorithms": ["from dataclasses import dataclass\n\nfrom rlflow.algorithms import GRPO\n"],
    "my_callbacks": ["from rlflow import Callback\n"],
    "my_env": ["class WordGame", "class CountDown", "def first_guess"],
    "my_functions": ["def add"],
    "my_rewards": ["def graded", "def boxed"],
    "my_steps": ["from rlflow import PerSample, RLModule, Rollout\n"],
}
ADDED = {  # what a sentence says of a file, by module
    "my_env": "class Calculator:\n    def __init__(self, digits): ...\n    def step(self, message): ...\n",
    "my_functions": "def exact(response, answer): ...\n",
}
ROWS = [
    {
        "prompt": "1+1=",
        "question": "1+1=",
        "answer": "2",
        "word": "two",
        "better": "2",
        "worse": "3",
        "input": "1+1=",
        "target": "2",
    }
] * 4
DATA = (
    "mine",
    "problems",
    "preferences",
    "conversations",
    "words",
    "sums",
    "cells_train",
    "cells_test",
    "others",
    "held_out",
)
BASE = {
    "module": {"class_path": "GRPO", "init_args": {"actor": "tiny", "reward": "exact_match"}},
    "data": {"train": "problems.jsonl", "prompts_per_step": 4},
    "trainer": {"run_dir": "runs/base", "max_steps": 1},
}
SECTIONS = {"reward": "module.init_args", "environment": "module.init_args", "train": "data"}  # of shorter blocks
ALSO = {  # what a block's settings need in addition, by a line of the block
    "placement: {rollout: 0, actor: 1-3, reference: 1-3}": ["--trainer.devices", "4", "--module.kl.coef", "0.1"],
    "placement: {rollout: 0-3, actor: 4-7, reference: 4-7}": ["--trainer.devices", "8", "--module.kl.coef", "0.1"],
    "placement: {rollout: 0, actor: 1-2}": ["--trainer.devices", "3"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with the files that the documents name."""
    folder = tmp_path_factory.mktemp("documents")
    for module, beginnings in MODULES.items():
        parts = [block.code for begins in beginnings for block in ALL if block.code.startswith(begins)]
        assert len(parts) == len(beginnings), module
        (folder / f"{module}.py").write_text("\n\n".join(parts) + ADDED.get(module, ""))
    for name in DATA:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    (folder / "mine.yaml").write_text(next(block.code for block in ALL if "my_functions.exact" in block.code))
    (folder / "machine.yaml").write_text("like: h100\n")
    for stage in ("sft", "grpo"):
        write_tiny_model(folder / "runs" / "quickstart" / stage / "model")
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory is the folder, whose modules are forgotten afterwards."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    with forgotten(folder):
        yield folder


PRELUDE = """
from typing import Any
from rlflow import Batch, CausalLM, Pairs, PerSample, PerToken, Rollout, RolloutWithTexts, RLModule, node
from rlflow.types import Each, NewRows, Ragged
"""
TRAINS = {  # blocks that train, each run by a test of its own
    "from datasets import load_dataset": "test_first_run.py::test_the_smallest_run_trains_in_an_empty_folder",
    "from datasets import Dataset\nfrom rlflow import Trainer": (
        "test_docs.py::test_the_recipe_for_users_of_trl_trains_with_a_reward_in_its_form"
    ),
}


@pytest.mark.parametrize("block", run_here("python"), ids=str)
def test_python_can_be_imported_and_its_nodes_are_nodes(block: Block, here: Path, tmp_path: Path) -> None:
    for begins, test in TRAINS.items():
        if block.code.startswith(begins):
            file, name = test.split("::")
            assert f"def {name}(" in (ROOT / "tests" / file).read_text()
            return
    code = block.code
    if "import" not in code:  # a part of a class, or of a module
        is_method = any("(self" in line for line in code.splitlines() if line.startswith("def "))
        indented = "".join(f"    {line}\n" for line in code.splitlines())
        code = PRELUDE + (f"class Shown(RLModule):\n{indented}" if is_method or code.startswith("@") else code)
    if block.page.name.startswith("0034"):  # fields of a class of ours, whose imports are left out
        ast.parse(code)
        return
    module = imported(code, f"shown_{block.page.stem}_{block.line}", tmp_path)
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, RLModule) and value.__module__ == module.__name__:
            nodes, _, problems = read_methods(value.__new__(value))
            assert problems == []
            assert nodes or not is_marked(block.code)


def is_marked(code: str) -> bool:
    return "@node" in code


@pytest.mark.parametrize("block", run_here("yaml"), ids=str)
def test_yaml_is_a_config_and_a_whole_one_has_a_plan(
    block: Block, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = yaml.safe_load(block.code)
    if "class_path" in tree.get("module", {}) and "run_dir" in tree.get("trainer", {}):
        (here / "shown.yaml").write_text(block.code)
        command(here, "graph", "--config", "shown.yaml")
        assert "plan of rank 0" in capsys.readouterr().out
        return
    for name, section in SECTIONS.items():
        if name in tree:
            value = tree.pop(name)
            for key in reversed([*section.split("."), name]):
                value = {key: value}
            tree |= value
    (here / "shown.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    also = next((options for line, options in ALSO.items() if line in block.code), [])
    read_fit(["--config", "base.yaml", "--config", "shown.yaml", *also])


@pytest.mark.parametrize("block", run_here("json"), ids=str)
def test_json_is_read_line_by_line(block: Block) -> None:
    assert all(isinstance(json.loads(line), dict) for line in block.code.splitlines())


def shell(code: str) -> list[list[str]]:
    """The commands of a block, in words."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("block", run_here("bash"), ids=str)
def test_a_shell_block_has_commands_and_options_that_exist(block: Block, here: Path) -> None:
    configs = [
        each.code
        for each in blocks(block.page)
        if each.why is None and each.language == "yaml" and "run_dir:" in each.code
    ]
    (here / "my.yaml").write_text(configs[0] if configs else (here / "base.yaml").read_text())
    (here / "agent.yaml").write_text(configs[-1] if configs else "")
    (here / "variation.yaml").write_text("nodes: {advantages: my_steps.centred}\n")
    for words in shell(block.code):
        check(words)


def check(words: list[str]) -> None:
    """Read a command with its options; nothing is run."""
    if "=" in words[0]:  # of the environment
        words = words[1:]
    program, *rest = words[0].removeprefix(".venv/bin/"), *words[1:]
    if program == "rlflow":
        check_rlflow(*rest)
    elif program == "torchrun":
        check_rlflow(*rest[rest.index("rlflow.cli") + 1 :])
    elif program == "make":
        assert re.search(rf"^{rest[0]}:.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE), rest
    elif program == "python" and rest[0] != "-c":
        file = ROOT / (f"{rest[1].replace('.', '/')}.py" if rest[0] == "-m" else rest[0])
        source = file.read_text(encoding="utf-8")
        assert [word for word in rest if word.startswith("--") and f'"{word}"' not in source] == []
    else:
        assert program in ("python", "pip", "pre-commit"), words


def check_rlflow(name: str, *arguments: str) -> None:
    """Read the options of a command of `rlflow` as the command does."""
    assert name in COMMANDS
    module = import_module(f"rlflow.commands.{name}")
    if name == "fit":
        read_fit(arguments)
    elif name == "doctor":
        source = Path(module.__file__ or "").read_text()
        assert [word for word in arguments if word.startswith("--") and f'"{word}"' not in source] == []
    else:
        main, reading = vars(module)[name], call_configured if "--config" in arguments else call
        if name == "simulate":
            arguments = tuple("--machines" if word == "--nodes" else word for word in arguments)
        called: list[str] = []
        reading(recorded(main, called), arguments)
        assert called == [name]


def recorded(main: Callable[..., Any], called: list[str]) -> Callable[..., None]:
    """A function with the signature of a command, which notes that it was called."""

    @functools.wraps(main)
    def note(*_: Any, **__: Any) -> None:
        called.append(main.__name__)

    return note


def test_every_command_within_a_sentence_exists() -> None:
    texts = {page.name: re.sub(FENCE, "", page.read_text(encoding="utf-8")) for page in PAGES}
    inline = [(page, shlex.split(found)) for page, text in texts.items() for found in CALLED.findall(text)]
    assert len(inline) > 50
    missing = [(page, words) for page, words in inline if not exists(words)]
    assert missing == []


CALLED = re.compile(r"`((?:\.venv/bin/)?(?:rlflow|python) [^`]+)`")


def exists(words: list[str]) -> bool:
    """Whether a command of `rlflow` is one, with configs that are there, or a script of Python's is there."""
    if words[0].endswith("rlflow"):
        configs = [word for word in words if word.startswith("configs/")]
        return (words[1] in COMMANDS or words[1] == "--help") and all((ROOT / each).is_file() for each in configs)
    named = words[2].replace(".", "/") if words[1] == "-m" and len(words) > 2 else words[1]
    others = ("-c", "my_run.py", "verl/trainer/main_ppo")
    return named in others or any((ROOT / path).is_file() for path in (named, f"{named}.py", f"{named}/__main__.py"))


@pytest.mark.parametrize(
    ("page", "config", "rank"),
    [("concepts.md", "quickstart_grpo.yaml", 0), ("placement.md", "grpo_apart.yaml", 1)],
)
def test_a_plan_that_is_shown_is_the_one_that_is_printed(
    page: str, config: str, rank: int, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = [block.code for block in ALL if block.page.name == page and re.match(r"  1  \w", block.code)]
    command(here, "graph", "--config", f"configs/{config}", "--rank", str(rank))
    assert capsys.readouterr().out.endswith(f":\n{shown}")


def test_the_mistakes_of_a_workflow_are_the_lines_that_are_shown(here: Path) -> None:
    page = [block for block in ALL if block.page.name == "workflow.md"]
    (shown,) = [block.code for block in page if block.language == "text"]
    (here / "my.yaml").write_text(next(block.code for block in page if block.language == "yaml"))
    mistakes = ("advantages.call=rlflow.functional.group_normalised_advantages", "actor_loss.settings.clp=1")
    for mistake, line in zip(mistakes, re.sub(r"\n  ", " ", shown).splitlines(), strict=True):
        with pytest.raises(UserError) as found:
            command(here, "graph", "--config", "my.yaml", f"--nodes.{mistake}")
        assert one_line(found.value) == line
