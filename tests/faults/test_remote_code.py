"""Code stored with a model's weights runs only for the role that allows it, and nobody is asked."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlflow import RLModule
from rlflow.cli import main
from tests.own_code import copies_in, write_own_model
from tests.own_folder import make, write

pytestmark = pytest.mark.row("safety")
ROOT = Path(__file__).parents[2]
LOADS = {"from_pretrained", "from_config", "LLM", "load_dataset"}
WITHOUT_CODE = {"GenerationConfig", "PeftConfig", "PeftModel"}  # these run none, and do not take the argument
ACTOR, CRITIC = "module.init_args.actor", "module.init_args.critic"


@pytest.fixture(scope="module", autouse=True)
def copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with copies_in(tmp_path_factory.mktemp("copies")):
        yield


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model with code of its own, next to `my.yaml`; any question to a person fails."""
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(f"asked {question!r}"))
    return write_own_model(tmp_path / "own", was_run=tmp_path / "was_run")


def refusal(capfd: pytest.CaptureFixture[str], changes: dict[str, Any], command: str = "fit") -> str:
    """The one line that the run of a config ends with, and code 2."""
    write(Path("my.yaml"), changes)
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([command, "--config", "my.yaml"])
    (line,) = capfd.readouterr().err.splitlines()
    assert ended.value.code == 2
    return line


def test_a_model_s_own_code_is_refused_in_one_line_that_names_the_key_and_is_not_run(
    own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capfd, {f"{ACTOR}.model": str(own)})
    assert line == (
        f"rlflow: error: `{ACTOR}.model` is {str(own)!r}, whose configuration is code stored with it"
        f" (`auto_map`), and code that runs can do all that you can; read it, then set `{ACTOR}.trust_remote_code` to"
        " true, or take a model that transformers knows by itself"
    )
    assert not Path("was_run").exists()


def test_a_trusted_model_trains_says_so_first_and_is_saved_with_its_code(
    own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(Path("my.yaml"), {f"{ACTOR}.model": str(own), "trainer.max_steps": 1})
    main(["fit", "--config", "my.yaml", "--module.actor.trust_remote_code", "true"])
    first = capfd.readouterr().out.splitlines()[0]
    assert first == f"`trust_remote_code` is on for `actor`: the code stored with {str(own)!r} is run"
    assert Path("was_run").exists()
    saved = Path("runs/own/model").rename("saved")
    for path in own.iterdir():
        path.unlink()
    model = AutoModelForCausalLM.from_pretrained(saved.resolve(), trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(saved.resolve(), trust_remote_code=True)
    assert (type(model).__name__, type(tokenizer).__name__) == ("OwnForCausalLM", "OwnTokenizer")
    assert "is code stored with it" in refusal(capfd, {f"{ACTOR}.model": str(saved)})
    changes = {f"{ACTOR}.model": str(saved), f"{ACTOR}.trust_remote_code": True, "trainer.max_steps": 1}
    write(Path("my.yaml"), changes)
    main(["fit", "--config", "my.yaml"])
    assert Path("runs/own/model/modeling_own.py").is_file()


def test_a_role_s_trust_is_not_another_s(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ppo = {"module.class_path": "rlflow.algorithms.PPO", f"{ACTOR}.trust_remote_code": True}
    line = refusal(capfd, ppo | {f"{CRITIC}.model": str(own)})
    assert line.startswith(f"rlflow: error: `{CRITIC}.model` is {str(own)!r}, whose configuration is code stored")
    assert f"set `{CRITIC}.trust_remote_code` to true" in line
    assert not Path("was_run").exists()


def test_a_critic_of_the_actor_s_model_is_of_its_code_too(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changes = {"module.class_path": "rlflow.algorithms.PPO", "trainer.max_steps": 1}
    write(Path("my.yaml"), changes | {f"{ACTOR}.model": str(own), f"{ACTOR}.trust_remote_code": True})
    main(["fit", "--config", "my.yaml"])
    assert "on for `actor`, `critic`: the code" in capfd.readouterr().out.splitlines()[0]
    described = json.loads(Path("runs/own/model-critic/config.json").read_text())
    assert described["architectures"] == ["OwnForSequenceClassification"]


def test_a_trusted_model_is_validated(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    validation = {"class_path": "rlflow.data.JSONL", "init_args": {"path": "rows.jsonl"}}
    trusted = {f"{ACTOR}.model": str(own), f"{ACTOR}.trust_remote_code": True}
    write(Path("my.yaml"), trusted | {"data.validation": validation})
    main(["validate", "--config", "my.yaml"])
    assert capfd.readouterr().out.startswith("`trust_remote_code` is on for `actor`: ")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("import a_module_that_nobody_has", "(ImportError: "),
        ("raise KeyError('gone')", "(KeyError: 'gone')"),
        ("raise SystemExit(0)", "called `sys.exit(0)`"),
        ("OwnForCausalLM._supports_attention_backend = False", "has attention of its own, which cannot be kept within"),
        ("del OwnForCausalLM", "has no attribute 'OwnForCausalLM'"),
    ],
)
def test_code_that_fails_or_cannot_be_trained_is_named_in_one_line(
    own: Path, wrong: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with (own / "modeling_own.py").open("a") as code:
        code.write(f"\n\n{wrong}\n")
    line = refusal(capfd, {f"{ACTOR}.model": str(own), f"{ACTOR}.trust_remote_code": True})
    assert line.startswith("rlflow: error: ")
    assert reason in line


def test_a_configuration_that_does_not_say_what_is_read_of_it_is_refused(
    own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    described = json.loads((own / "config.json").read_text())
    del described["num_attention_heads"]
    (own / "config.json").write_text(json.dumps(described))
    (own / "configuration_own.py").write_text((own / "configuration_own.py").read_text().replace("Qwen2", "PreTrained"))
    line = refusal(capfd, {f"{ACTOR}.model": str(own), f"{ACTOR}.trust_remote_code": True})
    assert "of the type 'own': it has a configuration that does not say `num_attention_heads`; give a decoder" in line


def test_an_adapter_of_such_a_model_is_exported_with_its_code_where_that_is_said(
    own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trusted = {f"{ACTOR}.model": str(own), f"{ACTOR}.trust_remote_code": True, f"{ACTOR}.lora": {"rank": 2}}
    write(Path("my.yaml"), trusted | {"trainer.max_steps": 1})
    main(["fit", "--config", "my.yaml"])
    export = ["export", "--model", "runs/own/model", "--to", "merged"]
    Path("was_run").unlink()
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(export)
    assert ended.value.code == 2
    assert "read it, then set `rlflow export --trust_remote_code` to true" in capfd.readouterr().err.splitlines()[-1]
    assert not Path("was_run").exists()
    main([*export, "--trust_remote_code", "true"])
    of_run = Path(vars(RLModule.load_from_checkpoint("runs/own"))["actor"].model)
    for folder in (Path("merged"), of_run):  # what a run's config trusts is trusted where its module is loaded
        model = AutoModelForCausalLM.from_pretrained(folder.resolve(), trust_remote_code=True)
        assert type(model).__name__ == "OwnForCausalLM"


def test_code_that_asks_for_more_code_and_does_not_say_whether_asks_nobody(
    own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more = write_own_model(own.parent / "more", was_run=own.parent / "more_was_run")
    with (own / "modeling_own.py").open("a") as code:
        code.write(f"\n\nfrom transformers import AutoConfig\n\nAutoConfig.from_pretrained({str(more)!r})\n")
    line = refusal(capfd, {f"{ACTOR}.model": str(own), f"{ACTOR}.trust_remote_code": True})
    assert "whose architecture cannot be loaded (Loading this model requires you to execute custom code" in line
    assert not Path("more_was_run").exists()


def test_whatever_loads_a_model_says_whose_code_may_run_and_no_dataset_s_may() -> None:
    found = []
    for path in [*(ROOT / "rlflow").rglob("*.py"), *(ROOT / "algorithms").rglob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in LOADS):
                continue
            if ast.unparse(call.func.value) in WITHOUT_CODE:
                continue
            said = [ast.unparse(given.value) for given in call.keywords if given.arg == "trust_remote_code"]
            by_role = call.func.attr != "load_dataset" and said in (
                ["trust_remote_code"],
                ["rank_info.trust_remote_code"],
            )
            found.append((path.name, call.func.attr, by_role or said == ["False"]))
    assert len(found) >= 9
    assert [load for load in found if not load[2]] == []
