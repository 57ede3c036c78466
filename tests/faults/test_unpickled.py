"""Only files of our own are unpickled or run as code; the test looks for calls in the source that do otherwise."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.errors import UserError
from rlflow.models.causal_lm import ScoringModel
from rlflow.models.tiny import write_tiny_model

pytestmark = pytest.mark.row("safety")
ROOT = Path(__file__).parents[2]
# An engine's own process, which a rank of the same machine and user starts, reads what that rank writes. `rlflow check`
# reads what the ranks that it has forked leave in a folder of its user's alone.
MAY_PICKLE = {"rlflow/rollout/engine_subprocess.py", "rlflow/testing/ranks.py"}
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE = {
    *("torch.save", "torch.jit.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"),
    *("eval", "exec", "builtins.eval", "builtins.exec", "os.system"),
}
# Of torch.distributed and of pipes: they pickle what they are given.
UNSAFE_METHODS = {"all_gather_object", "gather_object", "scatter_object_list"}
UNSAFE_METHODS |= {"broadcast_object_list", "recv_object_list", "send_object_list"}
UNSAFE_SETTINGS = {("allow_pickle", True), ("weights_only", False), ("shell", True)}
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text()
    for name in ("rlflow", "algorithms")
    for path in (ROOT / name).rglob("*.py")
}


def unsafe(source: str) -> list[str]:
    """The calls and imports of a source that could run what they read."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in PICKLES]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLES:
            found += [alias.name for alias in node.names if alias.name != "UnpicklingError"]
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {(each.arg, getattr(each.value, "value", True)) for each in node.keywords}
            if name in UNSAFE or name.split(".")[-1] in UNSAFE_METHODS or given & UNSAFE_SETTINGS:
                found.append(name)
            if name == "torch.load" and ("weights_only", True) not in given:
                found.append(name)
    return found


def test_no_module_unpickles_or_evaluates_but_those_of_an_engine_s_own_process() -> None:
    assert len(SOURCES) > 250
    found = {path: unsafe(source) for path, source in SOURCES.items()}
    assert {path for path, calls in found.items() if calls} == MAY_PICKLE
    assert {call for path in MAY_PICKLE for call in found[path]} == {"pickle"}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text, Loader)",
        "eval(text)",
        "dist.all_gather_object(texts, text)",
        "subprocess.run(line, shell=True)",
    ],
)
def test_source_that_could_run_untrusted_code_is_found(source: str) -> None:
    assert unsafe(source) != []


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_model_whose_weights_would_run_code_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"weight": _Runs(tmp_path / "was_run")}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot be loaded: its weights are not safetensors, and unpickling") as refused:
        ScoringModel.load(folder, torch.float32, torch.device("cpu"))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "was_run").exists()
