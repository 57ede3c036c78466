"""A config of before ends in one line that says how its settings are written now."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlflow import RLModule
from rlflow.algorithms import GRPO, PPO, SFT, OnPolicyDistillation, RewardModelTraining
from rlflow.cli import main
from rlflow.commands.moved_settings import MOVED, refuse_moved
from rlflow.errors import UserError
from rlflow.models.arguments import model_parameters

HAS: dict[str, type[RLModule]] = {"critic": PPO, "teacher": OnPolicyDistillation}


def config(cls: type, settings: dict[str, Any]) -> dict[str, Any]:
    return {"module": {"class_path": f"rlflow.algorithms.{cls.__name__}", "init_args": settings}}


@pytest.mark.parametrize("name", sorted(MOVED))
def test_each_setting_of_before_is_told_with_its_new_name(name: str) -> None:
    cls = HAS.get(MOVED[name].split(".")[0], GRPO)
    with pytest.raises(UserError) as refused:
        refuse_moved(config(cls, {name: 1}))
    assert f"`module.init_args` has `{name}`, which is now `{MOVED[name]}`" in str(refused.value)


@pytest.mark.parametrize("name", sorted(MOVED))
def test_each_new_name_is_one_that_an_algorithm_takes(name: str) -> None:
    part, _, rest = MOVED[name].partition(".")
    cls = HAS.get(part, GRPO)
    kind = model_parameters(cls).get(part) or type(vars(cls)["__dataclass_fields__"][part].default)
    assert not rest or rest in inspect.signature(kind).parameters


def test_the_command_ends_in_one_line_with_all_that_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = config(GRPO, {"model": "tiny", "optimizer": {"lr": 1e-5}, "group_size": 2})
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(old))
    with pytest.raises(SystemExit) as ended:
        main(["graph", "--config", str(tmp_path / "old.yaml"), "--module.epochs", "2"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    said = "`module.init_args` has `model`, `optimizer`, `epochs`, which are now "
    said += "`actor.model`, `actor.optimizer`, `actor.epochs`"
    assert said in line


def test_a_reward_model_in_training_is_told_as_what_it_is() -> None:
    with pytest.raises(UserError, match=r"`model`, which is now `reward_model.model`"):
        refuse_moved(config(RewardModelTraining, {"model": "tiny"}))


def test_a_setting_that_the_algorithm_of_a_user_still_has_is_legal() -> None:
    class Own(SFT):
        def __init__(self, model: str, epochs: int) -> None: ...

    refuse_moved(config(Own, {"model": "tiny", "epochs": 1}))


def test_a_setting_of_the_trainer_is_told_with_its_new_name() -> None:
    with pytest.raises(UserError, match=r"`trainer.keep_checkpoints` is now `trainer.save_last`; write so"):
        refuse_moved({"trainer": {"keep_checkpoints": 3}})
