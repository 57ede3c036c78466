"""Short names of rlflow's own classes, from Python; `tests/commands/test_configuration.py` has them in configs."""

from __future__ import annotations

import re
from importlib import import_module
from inspect import isabstract, isclass
from typing import get_args

import pytest

from rlflow import Callback, Environment, Reward, RLModule, Trainer, UserError
from rlflow.data import Source
from rlflow.dotted_path import object_at
from rlflow.loggers import CSVLogger, JSONLLogger, Logger, TensorBoardLogger, WandbLogger
from rlflow.loggers.lightning import LoggerLike
from rlflow.models.handle import ModelHandle
from rlflow.rewards import Rubric
from rlflow.rollout import RolloutEngine, TransformersEngine, VLLMEngine
from rlflow.short_names import SHORT_NAMES, class_named
from rlflow.strategies import FSDPStrategy, TrainingStrategy

KINDS: dict[str, tuple[list[type], str]] = {
    "module": ([RLModule], "rlflow.algorithms"),
    "model": ([ModelHandle], "rlflow"),
    "environment": ([Environment], "rlflow"),
    "reward": ([Reward, Rubric], "rlflow.rewards"),
    "data": ([Source], "rlflow.data"),
    "rollout": ([RolloutEngine], "rlflow.rollout"),
    "strategy": ([TrainingStrategy], "rlflow.strategies"),
    "logger": ([*get_args(LoggerLike)], "rlflow.loggers"),
    "callback": ([Callback], "rlflow.callbacks"),
}
BASES = {"PolicyGradient", "RLModule", "Callback", "EngineSubprocess", "TrainingStrategy"}  # which others are made of


@pytest.mark.parametrize("kind", SHORT_NAMES)
def test_every_class_that_a_config_can_name_has_a_short_name(kind: str) -> None:
    bases, room = KINDS[kind]
    module = import_module(room)
    exported = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    classes = {
        f"{room}.{each}"
        for each, cls in exported.items()
        if isclass(cls) and issubclass(cls, tuple(bases)) and not isabstract(cls) and each not in BASES
    }
    assert classes <= {*SHORT_NAMES[kind].values()}
    assert all(issubclass(object_at(path, path), tuple(bases)) for path in SHORT_NAMES[kind].values())


@pytest.mark.parametrize("kind", SHORT_NAMES)
def test_a_short_name_and_the_name_of_the_class_are_both_known(kind: str) -> None:
    bases, _ = KINDS[kind]
    for short, path in SHORT_NAMES[kind].items():
        assert re.fullmatch("[a-z_]+", short)
        assert class_named(short, bases) is class_named(path.rpartition(".")[2], bases) is object_at(path, path)


def test_one_name_may_stand_for_classes_of_two_kinds() -> None:
    assert class_named("jsonl", [Logger]) is JSONLLogger
    assert class_named("jsonl", [Source]) is object_at("rlflow.data.JSONL", "")


def test_a_trainer_takes_short_names() -> None:
    trainer = Trainer(strategy="fsdp", rollout="vllm", engines={"critic": "transformers"}, logger=["wandb", "csv"])
    assert isinstance(trainer.strategy, FSDPStrategy)
    assert isinstance(trainer.rollout, VLLMEngine)
    assert isinstance(trainer.engines["critic"], TransformersEngine)
    assert [type(each) for each in trainer.loggers] == [WandbLogger, CSVLogger]
    assert trainer.logger is trainer.loggers[0]


def test_logger_true_is_tensorboard_and_false_is_none_as_in_lightning() -> None:
    assert [type(each) for each in Trainer(logger=True).loggers] == [TensorBoardLogger]
    assert Trainer(logger=False).loggers == []


@pytest.mark.parametrize(("name", "value"), [("devices", "two"), ("val_check_interval", 0.25)])
def test_a_number_of_lightnings_that_has_no_meaning_here_is_refused(name: str, value: str | float) -> None:
    with pytest.raises(UserError, match=f"`trainer.{name}` is '?{value}'?; give a whole number, 1 or more"):
        Trainer(**{name: value})


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"strategy": "fspd"}, "`strategy` is 'fspd', and no class is known by that name. Did you mean \"fsdp\"?"),
        ({"rollout": "grpo"}, "`rollout` is 'grpo', and no class is known by that name. Write module.Class, such as"),
        ({"engines": {"critic": "vlm"}}, "`engines.critic` is 'vlm', and no class is known by that name. Did you"),
        (
            {"logger": ["csv", "os.sep"]},
            "`logger` names the class os.sep, which is not a subclass of Logger or FabricLogger; name",
        ),
        ({"callbacks": ["early_stopping"]}, "`callbacks` is 'early_stopping', and EarlyStopping needs `monitor`;"),
        ({"callbacks": "early_stopping"}, "`callbacks` is 'early_stopping', and EarlyStopping needs `monitor`;"),
        ({"strategy": 5}, "`strategy` is 5; give a TrainingStrategy, or the name of its class"),
    ],
)
def test_a_name_that_a_trainer_cannot_take_is_refused_in_one_line(given: dict[str, object], line: str) -> None:
    with pytest.raises(UserError, match=re.escape(line)):
        Trainer(**given)  # type: ignore[arg-type]
