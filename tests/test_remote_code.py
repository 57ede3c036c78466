"""Code that lies beside a model's weights is never run, and nobody is asked whether it may be."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from rlflow.cli import main
from rlflow.models.tiny import write_tiny_model
from tests.own_folder import make, write

ROOT = Path(__file__).parents[1]
LOADS = {"from_pretrained", "from_config", "LLM", "load_dataset"}
WITHOUT_CODE = {"GenerationConfig", "PeftConfig", "PeftModel"}  # these run none, and do not take the argument


def test_a_model_that_needs_code_of_its_own_is_refused_in_one_line_and_the_code_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_model(tmp_path / "own")
    described = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(described | {"model_type": "own", "auto_map": own}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    make(tmp_path)
    write(tmp_path / "my.yaml", {"module.init_args.actor.model": str(folder)})
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "y")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", "my.yaml"])
    (line,) = capfd.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"rlflow: error: `module.init_args.actor.model` is {str(folder)!r}, whose ")
    assert "is code that lies beside it (`auto_map`), and rlflow runs no code of a model; take one" in line
    assert asked == []
    assert not (tmp_path / "was_run").exists()


def test_whatever_loads_a_model_or_a_dataset_forbids_code_that_lies_beside_it() -> None:
    found = []
    for path in [*(ROOT / "rlflow").rglob("*.py"), *(ROOT / "algorithms").rglob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in LOADS):
                continue
            if ast.unparse(call.func.value) in WITHOUT_CODE:
                continue
            forbids = "trust_remote_code=False" in ast.unparse(call)
            found.append((path.name, call.func.attr, forbids))
    assert len(found) >= 9
    assert [load for load in found if not load[2]] == []
