"""From YAML and options to objects."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from docstring_parser import parse

from rlflow.algorithms import GRPO
from rlflow.callbacks import ModelCheckpoint
from rlflow.cli import COMMANDS, main
from rlflow.commands.configuration import TOP_LEVEL, Configured, call_configured, config_parser
from rlflow.commands.fit import read_fit
from rlflow.config.arguments import arguments_of
from rlflow.config.checking import hidden_secrets
from rlflow.data import JSONL
from rlflow.errors import UserError
from rlflow.rewards import ExactMatch
from rlflow.rollout import VLLMEngine
from rlflow.short_names import class_named, names_of
from rlflow.strategies import DeepSpeedStrategy, FSDPStrategy, SingleProcess, TrainingStrategy
from rlflow.trainer import Trainer
from tests.own_folder import forgotten, make, write


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    with forgotten(tmp_path):
        sys.path.insert(0, str(tmp_path))
        yield tmp_path


def test_of_two_configs_the_later_wins_and_keeps_what_it_does_not_name(folder: Path) -> None:
    (folder / "more.yaml").write_text("trainer: {max_steps: 7}\n")
    trainer = read_fit(["--config", "my.yaml", "--config", "more.yaml"]).trainer
    assert (trainer.settings.max_steps, trainer.settings.run_dir) == (7, "runs/own")


def test_a_module_that_changes_folder_on_import_does_not_move_the_command(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "moving.py").write_text(
        "import os\nfrom rlflow.algorithms import GRPO\nos.chdir('other')\nclass Own(GRPO): pass\n"
    )
    write(folder / "my.yaml", {"module.class_path": "moving.Own"})
    assert type(read_fit(["--config", "my.yaml"]).module).__name__ == "Own"
    assert Path.cwd() == folder


def test_an_option_wins_over_the_config_before_it(folder: Path) -> None:
    assert read_fit(["--config", "my.yaml", "--trainer.max_steps", "9"]).trainer.settings.max_steps == 9


def test_a_config_wins_over_the_option_before_it(folder: Path) -> None:
    assert read_fit(["--trainer.max_steps", "9", "--config", "my.yaml"]).trainer.settings.max_steps == 2


def test_an_argument_of_a_class_is_overridden_without_naming_the_class_again(folder: Path) -> None:
    configured = read_fit(["--config", "my.yaml", "--module.group_size", "5", "--module.actor.optimizer.lr", "0.5"])
    assert (configured.module.group_size, configured.module.actor.optimizer.lr) == (5, 0.5)


def test_a_policy_s_engine_is_another_or_a_share_of_another_s(folder: Path) -> None:
    small = {"class_path": "rlflow.rollout.TransformersEngine", "init_args": {"max_batch": 3}}
    write(folder / "my.yaml", {"engines": {"opponent": small, "judge": {"share": "opponent"}}})
    engines = read_fit(["--config", "my.yaml"]).trainer.engine_settings.assigned(["actor", "opponent", "judge"])
    assert [engines[policy].max_batch for policy in ("actor", "opponent")] == [256, 3]  # type: ignore[attr-defined]
    assert engines["judge"] is engines["opponent"]


def test_a_class_of_the_user_s_own_is_found_in_the_folder_of_the_config(folder: Path) -> None:
    configured = read_fit(["--config", "my.yaml", "--module.class_path", "my_algorithm.ShortGRPO"])
    assert type(configured.module).__name__ == "ShortGRPO"


@pytest.mark.parametrize("name", ["summing.jsonl", "summing.v2"])
def test_the_path_of_a_dataset_does_not_run_a_script_of_its_name(name: str, folder: Path) -> None:
    (folder / "summing.py").write_text("from pathlib import Path\n\nPath('ran').touch()\n")
    (folder / "summing.v2").mkdir()
    (folder / "summing.v2/rows.jsonl").touch()
    (folder / "summing.jsonl").touch()
    read_fit(["--config", "my.yaml", "--data.train", name])
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("form", ["", "=skip_default"])
def test_a_printed_config_reads_back_as_the_same_config(
    form: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = "{class_path: lightning.pytorch.loggers.TensorBoardLogger, init_args: {save_dir: tb, name: '1e-5'}}"
    (folder / "more.yaml").write_text(f"logger: {logger}\n")
    arguments = ["--config", "my.yaml", "--config", "more.yaml", "--trainer.max_steps", "9"]
    with pytest.raises(SystemExit) as ended:
        main(["fit", *arguments, f"--print_config{form}"])
    assert not ended.value.code
    (folder / "printed.yaml").write_text(printed := capsys.readouterr().out)
    assert read_fit(["--config", "printed.yaml"]).config == read_fit(arguments).config
    assert ("max_staleness" in printed) == ("skip_default" not in form)


@pytest.mark.skipif(find_spec("ruamel") is not None, reason="ruamel.yaml is installed")
def test_comments_in_a_printed_config_need_a_library_that_is_named(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"needs ruamel.yaml, which is not installed; `pip install ruamel.yaml`, or leave"
    ):
        read_fit(["--config", "my.yaml", "--print_config=comments,skip_default"])


def test_the_config_of_a_run_reads_back_as_the_same_config_without_its_secrets(folder: Path) -> None:
    write(folder / "my.yaml", {"trainer.max_steps": 1})
    configured = read_fit(["--config", "my.yaml"])
    configured.fit()
    again = read_fit(["--config", "runs/own/config.yaml"])
    assert again.config == configured.config


@pytest.mark.parametrize("reward", [{"nan": "my_rewards.nan", "raises": "my_rewards.raises"}, ["my_rewards.nan"]])
def test_the_config_of_a_run_has_a_reward_of_several_functions(reward: object, folder: Path) -> None:
    write(folder / "my.yaml", {"module.init_args.reward": reward})
    assert read_fit(["--config", "my.yaml"]).config["module"]["init_args"]["reward"] == reward


def test_a_secret_of_the_config_is_not_in_the_run_s_folder(folder: Path) -> None:
    write(folder / "my.yaml", {"trainer.max_steps": 1, "module.class_path": "my_algorithm.WithToken"})
    with (folder / "my_algorithm.py").open("a") as file:
        file.write(
            "\n\nclass WithToken(GRPO):\n"
            "    def __init__(self, actor: CausalLM, reward: Reward, hf_token: str = 'hf_1234', **kwargs):\n"
            "        super().__init__(actor, reward, **kwargs)\n"
        )
    (folder / "my_algorithm.py").write_text(
        "from rlflow import CausalLM, Reward\n" + (folder / "my_algorithm.py").read_text()
    )
    read_fit(["--config", "my.yaml"]).fit()
    saved = (folder / "runs/own/config.yaml").read_text()
    assert "hf_1234" not in saved
    assert yaml.safe_load(saved)["module"]["init_args"]["hf_token"] == "***"
    said = r"`module.init_args.hf_token` is \*\*\*, which is how a run's `config.yaml` hides a secret; give the secret"
    with pytest.raises(UserError, match=said):
        read_fit(["--config", "runs/own/config.yaml"]).fit()


def test_a_command_that_only_reads_a_model_needs_no_secret_of_a_logger(folder: Path) -> None:
    def validate(configured: Configured, /) -> Configured:
        return configured

    (folder / "my_logger.py").write_text(
        "from rlflow.loggers import CSVLogger\n\nclass Sent(CSVLogger):\n    def __init__(self, api_key: str): ...\n"
    )
    write(folder / "my.yaml", {"logger": {"class_path": "my_logger.Sent", "init_args": {"api_key": "***"}}})
    configured = call_configured(validate, ["--config", "my.yaml"])
    with pytest.raises(UserError, match=r"`logger.init_args.api_key` is \*\*\*"):
        configured.fit()


@pytest.mark.parametrize("arguments", [["serve", "--api_key", "***"], ["serve", "--api_key=***"]])
def test_a_hidden_secret_among_arguments_is_found(arguments: list[str]) -> None:
    (found,) = hidden_secrets({"harness": {"run": arguments}})
    assert found.keys == ("harness", "run", "--api_key")
    assert not [*hidden_secrets({"harness": {"run": ["serve", "--stars", "***"]}, "banned": ["password", "***"]})]


@pytest.mark.parametrize(("path", "first"), [("drawn/graph.mmd", "flowchart TD"), ("drawn/graph.md", "```mermaid")])
def test_a_graph_is_drawn_as_mermaid(path: str, first: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["graph", "--config", "my.yaml", "--draw", path])
    assert (folder / path).read_text().splitlines()[0] == first
    assert capsys.readouterr().out.splitlines()[-1] == f"drew {path}"


def test_a_graph_that_cannot_be_written_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["graph", "--config", "my.yaml", "--draw", "my.yaml/graph.md"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "my.yaml cannot be written (File exists); give another place by `--draw`" in line


def test_a_graph_is_drawn_in_no_other_format(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["graph", "--config", "my.yaml", "--draw", "graph.svg"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "`--draw` is 'graph.svg', and graphs are drawn in Mermaid; end it in .md or .mmd" in line


@pytest.mark.parametrize(
    ("written", "options", "expected"),
    [
        ("fsdp", (), FSDPStrategy()),
        ("single", (), SingleProcess()),
        ("{class_path: fsdp, init_args: {hsdp_shard_size: 4}}", (), FSDPStrategy(hsdp_shard_size=4)),
        ("deepspeed", ("--strategy.stage", "3"), DeepSpeedStrategy(3)),
        (
            "deepspeed",
            ("--strategy", "fsdp", "--strategy.init_args.hsdp_shard_size", "2"),
            FSDPStrategy(hsdp_shard_size=2),
        ),
        ("deepspeed", ("--strategy=fsdp", "--strategy.precision=bf16"), FSDPStrategy("bf16")),
        ("{class_path: rlflow.strategies.DeepSpeedStrategy}", ("--strategy.class_path", "fsdp"), FSDPStrategy()),
    ],
)
def test_a_strategy_has_a_short_name(
    written: str, options: tuple[str, ...], expected: TrainingStrategy, folder: Path
) -> None:
    (folder / "more.yaml").write_text(f"strategy: {written}\n")
    found = read_fit(["--config", "my.yaml", "--config", "more.yaml", *options]).trainer.strategy
    assert type(found) is type(expected)
    for name in ("dtype", "stage", "hsdp_shard_size"):
        assert getattr(found, name, None) == getattr(expected, name, None)


def test_a_config_with_a_short_name_is_printed_with_the_class(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--config", "my.yaml", "--strategy", "fsdp", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["strategy"]["class_path"] == "rlflow.strategies.FSDPStrategy"


def test_a_logger_of_lightnings_is_made_by_its_path_and_its_arguments_are_checked(folder: Path) -> None:
    entry = {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"save_dir": "tb"}}
    write(folder / "my.yaml", {"logger": [entry]})
    (logger,) = read_fit(["--config", "my.yaml"]).trainer.loggers
    assert (type(logger).__module__, logger.save_dir) == ("lightning.pytorch.loggers.tensorboard", "tb")  # type: ignore[union-attr]
    write(folder / "my.yaml", {"logger": [entry | {"init_args": {"save_dri": "tb"}}]})
    with pytest.raises(UserError, match=r"`logger.0.init_args.save_dri` .*Did you mean \"save_dir\""):
        read_fit(["--config", "my.yaml"])


def test_a_logger_whose_library_is_missing_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.loggers.mlflow._MLFLOW_AVAILABLE", False)
    write(folder / "my.yaml", {"logger": [{"class_path": "lightning.pytorch.loggers.MLFlowLogger"}]})
    with pytest.raises(UserError, match=r"^`logger.0` names MLFlowLogger, whose library is missing"):
        read_fit(["--config", "my.yaml"])


SHORT = """
module: {class_path: %s, init_args: {actor: tiny, reward: %s}}
data: {train: {class_path: jsonl, init_args: {path: rows.jsonl}}, prompts_per_step: 2}
trainer: {max_steps: 1}
rollout: %s
logger: [csv, {class_path: wandb, init_args: {mode: offline}}]
callbacks: [{class_path: early_stopping, init_args: {monitor: val/reward, patience: 1}}]
engines: {critic: transformers}
"""


@pytest.mark.parametrize(
    "names",
    [
        ("GRPO", "exact_match", "transformers"),
        ("grpo", "ExactMatch", "TransformersEngine"),
        ("rlflow.algorithms.GRPO", "rlflow.rewards.ExactMatch", "rlflow.rollout.TransformersEngine"),
    ],
)
def test_classes_of_every_kind_have_short_names(names: tuple[str, ...], folder: Path) -> None:
    (folder / "short.yaml").write_text(SHORT % names)
    found = read_fit(["--config", "short.yaml"])
    made = (found.module, found.module.reward, found.trainer.rollout, found.data.train, found.trainer.engines["critic"])
    assert [type(each).__name__ for each in made] == [
        "GRPO",
        "ExactMatch",
        "TransformersEngine",
        "JSONL",
        type(made[2]).__name__,
    ]
    assert [type(each).__name__ for each in found.trainer.loggers] == ["CSVLogger", "WandbLogger"]
    assert [type(each).__name__ for each in found.trainer.callbacks] == ["EarlyStopping"]


def test_options_take_short_names(folder: Path) -> None:
    found = read_fit(["--config", "my.yaml", "--rollout", "vllm", "--logger+", "csv", "--module", "dapo"])
    assert type(found.trainer.rollout).__name__ == "VLLMEngine"
    assert [type(each).__name__ for each in found.trainer.loggers] == ["CSVLogger"]
    assert type(found.module).__name__ == "DAPO"
    assert type(found.module.reward).__name__ == type(read_fit(["--config", "my.yaml"]).module.reward).__name__


def test_one_logger_needs_no_list_and_others_are_added_to_it(folder: Path) -> None:
    (folder / "more.yaml").write_text("logger: csv\n")
    found = read_fit(["--config", "my.yaml", "--config", "more.yaml"])
    assert [type(each).__name__ for each in found.trainer.loggers] == ["CSVLogger"]
    found = read_fit(["--config", "my.yaml", "--config", "more.yaml", "--logger+", "jsonl"])
    assert [type(each).__name__ for each in found.trainer.loggers] == ["CSVLogger", "JSONLLogger"]


def test_a_config_takes_a_logger_of_true_or_false(folder: Path) -> None:
    for value, names in (("true", ["TensorBoardLogger"]), ("false", [])):
        found = read_fit(["--config", "my.yaml", "--logger", value])
        assert [type(each).__name__ for each in found.trainer.loggers] == names


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert not ended.value.code
    assert capsys.readouterr().out.startswith(f"usage: rlflow {command} ")


@pytest.mark.parametrize(("command", "option"), [("fit", "--trainer.run_dir"), ("test", "--module.actor")])
def test_help_shows_where_a_run_is_written_or_how_it_is_read(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"rlflow {command} --config my.yaml {option} runs/mine" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_shows_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 40
    assert re.search(rf"^example:\s+rlflow {command} \S", shown, re.MULTILINE)


def test_help_shows_further_runs_as_optional_and_the_first_as_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: rlflow report run_dir [others ...] [--OPTION VALUE ...]\n")
    assert "required" not in shown


def test_help_has_the_keys_that_most_runs_need_and_help_all_has_every_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = {}
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main(["fit", option])
        shown[option] = capsys.readouterr().out
    assert {"--trainer.max_steps", "--predict"} <= set(shown["--help"].split())  # a key of OFTEN, and fit's own
    keys = {f"--trainer.{name}" for name in arguments_of(Trainer)} - {f"--trainer.{name}" for name in TOP_LEVEL}
    assert keys <= {word.rstrip(",") for word in shown["--help-all"].split()}  # Python 3.13 has commas between names


def test_help_of_every_key_is_a_sentence() -> None:
    keys = {each.dest: each.help for each in config_parser("fit", "")._actions}
    assert len(keys) > 60
    assert [key for key, said in keys.items() if not said] == []
    classes = {name: class_named(name, (object,)) for name in names_of([object])}
    assert len(classes) > 60
    lacking = {
        (name, key)
        for name, cls in classes.items()
        for key in arguments_of(cls)
        if key not in {each.arg_name for base in cls.__mro__ for each in parse(base.__doc__ or "").params}
    }
    assert lacking == set()


@pytest.mark.parametrize(
    ("arguments", "key", "cls"),
    [
        (["--module.help", "GRPO"], "module", GRPO),
        (["--module.help", "rlflow.algorithms.GRPO"], "module", GRPO),
        (["--config", "my.yaml", "--rollout.help=vllm"], "rollout", VLLMEngine),
        (["--strategy.help", "fsdp"], "strategy", FSDPStrategy),
        (["--trainer.callbacks.help", "ModelCheckpoint"], "callbacks", ModelCheckpoint),
        (["--data.train.help", "jsonl"], "data.train", JSONL),
        (["--module.reward.help", "exact_match"], "module.reward", ExactMatch),
    ],
)
def test_help_of_a_class_by_any_of_its_names_has_its_settings(
    arguments: list[str], key: str, cls: type, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", *arguments])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: rlflow fit --{key} ")
    listed = {word.split(".")[key.count(".") + 1] for word in shown.split() if word.startswith(f"--{key}.")}
    assert {*arguments_of(cls)} <= listed


def test_help_of_a_key_without_a_class_names_the_classes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--strategy.help"])
    assert not ended.value.code
    assert capsys.readouterr().out.rstrip().endswith("lists the settings of one of: deepspeed, fsdp, single")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("GRP", """is 'GRP', and no class is known by that name. Did you mean "GRPO"?"""),
        ("vllm", "is 'vllm', and no class is known by that name. Write module.Class, such as "),
        (
            "rlflow.rewards.ExactMatch",
            "names the class rlflow.rewards.ExactMatch, which is not a subclass of RLModule; ",
        ),
    ],
)
def test_help_of_an_unknown_class_is_refused(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--module.help", name])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rlflow: error: `--module.help` {said}")
