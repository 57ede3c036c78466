"""A wrong key, class or option ends in one line that names it and says what to write; exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bad_input.refusal import Case, Refused, ids, refusal
from tests.own_folder import REMOVED, rewarded_by

CASES: list[Case] = [
    ("a misspelt section", {"modle": 3}, '`modle` (3) is not a known key. Did you mean "module"?'),
    (
        "a misspelt key",
        {"trainer.max_step": 3},
        '`trainer.max_step` (3) is not a known key. Did you mean "max_steps"?',
    ),
    (
        "a misspelt argument of a class",
        {"module.init_args.group_sise": 3},
        '`module.init_args.group_sise` (3) is not a known key. Did you mean "group_size"?',
    ),
    (
        "a misspelt argument of a class within a class",
        {"module.init_args.reward.init_args": {"anwser": "a"}},
        "`module.init_args.reward.init_args.anwser` ('a') is not a known key. Did you mean \"answer\"?",
    ),
    (
        "a misspelt argument in a list",
        {"callbacks": [{"class_path": "rlflow.callbacks.EarlyStopping", "init_args": {"monitr": "x"}}]},
        "`callbacks.0.init_args.monitr` ('x') is not a known key. Did you mean \"monitor\"?",
    ),
    (
        "a misspelt field",
        {"module.init_args.actor.optimizer": {"weight_decai": 0.1}},
        '`module.init_args.actor.optimizer.weight_decai` (0.1) is not a known key. Did you mean "weight_decay"?',
    ),
    (
        "a key like none",
        {"seeds_of_everything": 1},
        "`seeds_of_everything` (1) is not a known key. Known here: callbacks, config, data, ",
    ),
    ("a text for an integer", {"trainer.devices": "two"}, "`trainer.devices` is 'two'; give an integer"),
    (
        "a text for a number",
        {"module.init_args.actor.optimizer": {"lr": "fast"}},
        "`module.init_args.actor.optimizer.lr` is 'fast'; give a number",
    ),
    ("a fraction for an integer", {"data.prompts_per_step": 3.5}, "`data.prompts_per_step` is 3.5; give an integer"),
    (
        "none of the choices",
        {"trainer.accelerator": "tpu"},
        "`trainer.accelerator` is 'tpu'; give one of 'auto', 'cpu',",
    ),
    (
        "none of the numbers",
        {"strategy": {"class_path": "rlflow.strategies.DeepSpeedStrategy", "init_args": {"stage": 5}}},
        "`strategy.init_args.stage` is 5; give one of 0, 1, 2, 3",
    ),
    (
        "one entry for a list",
        {"trainer.dump_steps": 3},
        "`trainer.dump_steps` is 3; give a list, each an integer",
    ),
    ("a section left out", {"data": REMOVED}, "`data.train` is missing; set it"),
    ("an argument left out", {"module.init_args.actor": REMOVED}, "`module.init_args.actor` is missing; set it"),
    (
        "a model left out",
        {"module.init_args.actor": {"epochs": 2}},
        "`module.init_args.actor.model` is missing; set it",
    ),
    (
        "a secret under an unknown key",
        {"trainer.wandb_api_key": "opensesame"},
        "`trainer.wandb_api_key` (***) is not a known key",
    ),
    (
        "a module that ends the process",
        {"module.class_path": "leaving_algorithm.GRPO"},
        "rank 0 called `sys.exit(0)` (before its first step), before the run came to its end; raise an error instead",
    ),
    ("null for a number", {"seed": None}, "`seed` is null; give an integer"),
    ("a section that is a list", {"trainer": [1]}, "`trainer` is [1]; give a mapping of keys"),
    ("a section with nothing in it", {"data": None}, "`data.train` is missing; set it"),
    ("null in a list", {"callbacks": [None]}, "`callbacks.0` is null; give a Callback"),
    (
        "a list for settings",
        {"module.init_args.actor.optimizer": [0.1]},
        "`module.init_args.actor.optimizer` is [0.1]; give a mapping of arguments",
    ),
    (
        "a number for a class",
        {"module.class_path": 3},
        "`module.class_path` is 3; give the name or the path of a class",
    ),
    (
        "a path of a file for a class",
        {"module.class_path": "../my.py"},
        "`module.class_path` is '../my.py', and no class is known by that name. Write module.Class, such as",
    ),
    (
        "an argument left out of a class in a mapping",
        {"models": {"critic": {"class_path": "rlflow.ValueModel"}}},
        "`models.critic.init_args.model` is missing; set it",
    ),
    ("a key of a terminal's codes", {"\x1b[2J\n": 1}, "`\\x1b[2J\\n` (1) is not a known key."),
    (
        "a misspelt short name",
        {"strategy": "fspd"},
        "`strategy` is 'fspd', and no class is known by that name. Did you mean \"fsdp\"?",
    ),
    (
        "a misspelt class",
        {"module.class_path": "rlflow.algorithms.GRP0"},
        'names the class rlflow.algorithms.GRP0, but rlflow.algorithms has no GRP0. Did you mean "GRPO"?',
    ),
    (
        "a misspelt class within a class",
        {"module.init_args.reward.class_path": "rlflow.rewards.ExactMatsh"},
        "`module.init_args.reward.class_path` names the class rlflow.rewards.ExactMatsh, but rlflow.rewards has no"
        ' ExactMatsh. Did you mean "ExactMatch"?',
    ),
    (
        "a misspelt module",
        {"module.class_path": "my_algoritm.ShortGRPO"},
        "`module.class_path` names the class my_algoritm.ShortGRPO, but there is no module my_algoritm."
        ' Did you mean "my_algorithm"?',
    ),
    (
        "a misspelt short class",
        {"module.class_path": "GRP"},
        "`module.class_path` is 'GRP', and no class is known by that name. Did you mean \"GRPO\"?",
    ),
    (
        "a module that cannot be imported",
        {"module.class_path": "broken_algorithm.GRPO"},
        "`module.class_path` names the class broken_algorithm.GRPO, which cannot be imported (No module named"
        " 'a_module_that_nobody_has'); correct its module",
    ),
    (
        "a class of another kind",
        {"data.train.class_path": "rlflow.rewards.ExactMatch"},
        "`data.train.class_path` names the class rlflow.rewards.ExactMatch, which is not a subclass of Source;"
        " name one that is",
    ),
    (
        "arguments without a class",
        {"module": {"model": "tiny"}},
        "`module.model` ('tiny') is not a key of its own; write `class_path` with the name of a class, and `init_args`",
    ),
    (
        "a misspelt function",
        rewarded_by("rases"),
        "`module.init_args.reward.init_args.function` is 'my_rewards.rases', but my_rewards has no rases."
        ' Did you mean "raises"?',
    ),
]


@pytest.mark.parametrize(("changes", "line"), [case[1:] for case in CASES], ids=ids(CASES))
def test_a_wrong_key_or_class_is_refused_in_one_line_before_a_model_is_loaded(
    refused: Refused,
    changes: dict[str, Any],
    line: str,
) -> None:
    assert line in refused(changes)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--trainer.max_step", "3"], '`trainer.max_step` (3) is not a known key. Did you mean "max_steps"?'),
        (["--trainer.max_step=3"], '`trainer.max_step` (3) is not a known key. Did you mean "max_steps"?'),
        (["--sed", "3"], '`sed` (3) is not a known key. Did you mean "seed"?'),
        (["--module.group_sise", "3"], '`module.group_sise` (3) is not a known key. Did you mean "group_size"?'),
        (
            ["--module.init_args.actor.optimizer.lrr", "3"],
            '`module.init_args.actor.optimizer.lrr` (3) is not a known key. Did you mean "lr"?',
        ),
        (["--trainer.devices", "many"], "`trainer.devices` is 'many'; give an integer"),
        (
            ["--trainer.balance", "of"],
            "`trainer.balance` is 'of'; give one of 'auto', 'off' or a mapping of arguments",
        ),
        (["--trainer.balance.quadratic", "x"], "`trainer.balance.quadratic` is 'x'; give a number"),
        (["--trainer.balance.quadratik", "1"], 'balance.quadratik` (1) is not a known key. Did you mean "quadratic"?'),
        (["--module.actor.optimizer.lr", "fast"], "`module.actor.optimizer.lr` is 'fast'; give a number"),
        (["--data.train.path"], "`--data.train.path` has no value; write `--data.train.path VALUE`"),
        (["--trainer.balance.bytes_per_s", "0"], "`trainer.balance.bytes_per_s` is 0; give more than 0"),
        (["--module", "rlflow.algorithms.GRP0"], 'but rlflow.algorithms has no GRP0. Did you mean "GRPO"?'),
        (["stray"], "`stray` is neither an option nor a value of one; an option is `--key value`"),
        (["--seed"], "`--seed` has no value; write `--seed VALUE`"),
        (["--config", "nowhere.yaml"], "`--config` is 'nowhere.yaml', and there is no such file in "),
        (
            ["--config", "list.yaml"],
            "`--config` is 'list.yaml', which holds no `key: value` lines but ['seed']; correct it",
        ),
        (["--config", "torn.yaml"], "`--config` is 'torn.yaml', which is not plain YAML (while parsing a flow mapping"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(
    folder: Path, capfd: pytest.CaptureFixture[str], options: list[str], line: str
) -> None:
    assert line in refusal(capfd, "fit", "--config", "my.yaml", *options)


def test_an_option_is_named_where_a_file_has_the_same_key(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = "`trainer.max_steps` is 'late'; give an integer or null"
    assert line == refusal(capfd, "fit", "--config", "my.yaml", "--trainer.max_steps", "late")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fti", "--config", "my.yaml"], "rlflow has no command 'fti'. Did you mean \"fit\"? Write"),
        (["--config", "my.yaml", "fit"], "Write `rlflow COMMAND --config FILE`"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert line in refusal(capfd, *arguments)


@pytest.mark.parametrize(
    ("option", "secret"),
    [
        ("--trainer.hf_token=opensesame", "opensesame"),
        ("--trainer.store={password: opensesame}", "opensesame"),
        ("--trainer.password=opensesame", "opensesame"),
        ("password=opensesame", "opensesame"),
    ],
)
def test_an_error_line_shows_no_secret(
    folder: Path, capfd: pytest.CaptureFixture[str], option: str, secret: str
) -> None:
    line = refusal(capfd, "fit", "--config", "my.yaml", option)
    assert secret not in line
    assert "***" in line
