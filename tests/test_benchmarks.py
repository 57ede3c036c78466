"""Benchmarks read what runs log."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from benchmarks import small_run, turns
from benchmarks.simulated_delays import delay
from benchmarks.size import Size, size_of
from rlflow import CausalLM, Environment
from rlflow.algorithms import DAPO, GRPO
from rlflow.data.loader import Prefetch
from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.transport import Transport
from rlflow.models.tiny import write_tiny_model
from rlflow.rollout import TransformersEngine
from tests.controller.runs import Fit, OddCharacters, fit, sums
from tests.ranks import RankPool
from tests.rollout.trained import setup
from tests.worker_processes import workers

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
METRIC = re.compile(r"(time|rollout|exchange|sync|balance|filter)/[a-z_]+")  # logged by every run, not by an algorithm


def test_turns_are_the_same_in_all_ways_that_are_compared(tmp_path: Path) -> None:
    """Else `compared` raises; and what is measured is what it says."""
    folder = write_tiny_model(tmp_path / "model", hidden_size=32, layers=1, max_position=turns.CONTEXT)
    engine = setup(TransformersEngine(), folder)
    given = {"conversations": 4, "turns": 2, "tokens": 4, "rounds": 1}
    conversations = turns.Conversations(folder, engine, given)
    try:
        found = turns.compared(conversations, 0.02, given)
        assert len(conversations.made) == 8
    finally:
        conversations.close()
    waits = [sum(delay(place, turn, 0.02) for turn in range(2)) for place in range(4)]
    assert found["seconds"]["longest_alone"][0] > max(waits)
    assert found["seconds"]["one_by_one"][0] > waits[0]
    assert not workers()


def metrics_read(file: Path) -> set[str]:
    """The names of metrics in a file, such as `time/step`."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if METRIC.fullmatch(text)}


def built(folder: Path) -> set[str]:
    """The parts of a run that a benchmark replaces; on one rank of its own."""
    found: set[str] = set()

    def instead(kind: type[Any]) -> Callable[..., Any]:
        return lambda *arguments, **named: found.add(kind.__name__) or kind(*arguments, **named)

    module = GRPO(CausalLM(str(folder / "policy")), OddCharacters(), group_size=2, max_response_length=8)
    parts = small_run.Parts(instead(Transport), instead(DataBuffer), instead(Prefetch))
    trained = small_run.train(module, sums(8, 2), 1, parts)
    assert trained.weights
    return found


def test_benchmarks_put_other_parts_in_the_place_of_a_runs_own(tmp_path: Path, ranks1: RankPool) -> None:
    write_tiny_model(tmp_path / "policy", hidden_size=32, layers=1, max_position=256)
    assert ranks1.run(built, tmp_path) == [{"Transport", "DataBuffer", "Prefetch"}]


def look() -> str:
    """Look."""
    return "nothing"


def test_metrics_that_benchmarks_read_are_logged(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "policy", hidden_size=32, layers=1, max_position=256)
    module = DAPO(CausalLM(str(model)), OddCharacters(), group_size=4, max_response_length=8, max_draws=10)
    (step,) = fit(Fit(module, sums(8, 2), tmp_path / "run")).steps
    environment = Environment(tools=[look], max_turns=2, max_turn_length=4)
    talking = GRPO(CausalLM(str(model)), OddCharacters(), group_size=2, environment=environment)
    talking.max_response_length = 60
    data = sums(8, 2)
    data.chat_template, data.max_prompt_length = True, 120
    (of_conversations,) = fit(Fit(talking, data, tmp_path / "talks")).steps
    step |= of_conversations
    files = [file for file in BENCHMARKS.rglob("*.py") if file.name != "renamed.py"]  # which has names of earlier code
    read = {(name, file.name) for file in files for name in metrics_read(file)}
    assert ("time/step", "predicted.py") in read
    assert sorted((name, file) for name, file in read if name not in step) == []


def test_code_is_counted_without_blank_lines_comments_and_docstrings() -> None:
    source = '"""Two\nlines."""\n\n# why\nclass A:\n    """One."""\n\n    x = """a\nb"""  # code of two lines\n'
    assert size_of(source) == Size(code=3, docstrings=3, files=1, classes=1)
    assert size_of(source).docstring_share == 0.5


def test_what_benchmarks_import_of_rlflow_is_there() -> None:
    scripts = BENCHMARKS.rglob("*.py")
    imports = [node for path in scripts for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    named = {(node.module, each.name) for node in imports if isinstance(node, ast.ImportFrom) for each in node.names}
    ours = [f"{module}.{name}" for module, name in named if str(module).split(".")[0] == "rlflow"]
    assert len(ours) > 100
    for path in ours:
        resolve_name(path)
