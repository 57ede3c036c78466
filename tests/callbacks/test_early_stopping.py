"""The rule to stop by, on a real trainer that runs no step."""

from __future__ import annotations

import json
import math

import pytest

from rlflow.callbacks import EarlyStopping
from rlflow.errors import UserError
from rlflow.module import RLModule
from rlflow.trainer import Trainer


def stops_after(callback: EarlyStopping, values: list[float]) -> int | None:
    """At which of the validations (the first is 1) the run is asked to stop; None if it is not."""
    trainer = Trainer()
    for look, value in enumerate(values, start=1):
        callback.on_validation_end(trainer, RLModule(), look, {"val/accuracy": value})
        if trainer.should_stop:
            return look
    return None


def test_a_run_ends_once_the_metric_reaches_the_threshold() -> None:
    assert stops_after(EarlyStopping("val/accuracy", mode="max", stopping_threshold=0.45), [0.1, 0.44, 0.45, 0.5]) == 3


def test_with_mode_min_smaller_is_better() -> None:
    assert stops_after(EarlyStopping("val/accuracy", mode="min", stopping_threshold=0.2), [0.5, 0.3, 0.1]) == 3


def test_a_run_ends_after_so_many_looks_without_a_better_value() -> None:
    # 0.3 is the best; 0.3 and 0.2 are the two looks without better.
    assert stops_after(EarlyStopping("val/accuracy", mode="max", patience=2), [0.1, 0.3, 0.3, 0.2, 0.9]) == 4


def test_a_better_value_restarts_the_patience() -> None:
    assert stops_after(EarlyStopping("val/accuracy", mode="max", patience=2), [0.3, 0.2, 0.4, 0.3, 0.5]) is None


def test_a_gain_of_at_most_min_delta_is_not_a_better_value() -> None:
    assert stops_after(EarlyStopping("val/accuracy", mode="max", patience=2, min_delta=0.25), [0.25, 0.5, 0.5]) == 3


def test_by_default_smaller_is_better_and_three_looks_are_waited_as_in_lightning() -> None:
    assert stops_after(EarlyStopping("val/accuracy"), [0.5, 0.4, 0.3, 0.3, 0.4, 0.3]) == 6


def test_a_value_that_is_not_finite_or_too_bad_ends_the_run() -> None:
    assert stops_after(EarlyStopping("val/accuracy"), [0.3, math.nan, 0.1]) == 2
    assert stops_after(EarlyStopping("val/accuracy", check_finite=False, patience=2), [0.3, math.nan, math.inf]) == 3
    assert stops_after(EarlyStopping("val/accuracy", divergence_threshold=0.5), [0.4, 0.5, 0.6]) == 3


def test_a_name_that_only_begins_as_those_of_validation_is_one_of_training() -> None:
    trainer = Trainer()
    EarlyStopping("value/loss", stopping_threshold=1.0).on_step_end(trainer, RLModule(), 1, {"value/loss": 0.5})
    assert trainer.should_stop


def test_a_fast_dev_run_makes_all_its_steps() -> None:
    trainer = Trainer(fast_dev_run=True)
    EarlyStopping("reward/mean", stopping_threshold=1.0).on_step_end(trainer, RLModule(), 1, {"reward/mean": 0.5})
    assert not trainer.should_stop


def test_a_metric_of_training_is_looked_at_after_each_step() -> None:
    trainer, callback = Trainer(), EarlyStopping("reward/mean", mode="max", stopping_threshold=0.9)
    callback.on_validation_end(trainer, RLModule(), 0, {"val/accuracy": 1.0})
    callback.on_step_end(trainer, RLModule(), 1, {"reward/mean": 0.8})
    assert not trainer.should_stop
    callback.on_step_end(trainer, RLModule(), 2, {"reward/mean": 0.9})
    assert trainer.should_stop


def test_a_metric_that_is_not_logged_is_refused_with_the_names_that_are() -> None:
    callback = EarlyStopping("val/acuracy", patience=1)
    said = r'`val/acuracy`.*Did you mean "val/accuracy"\? .* set `strict` to false. Logged: val/accuracy, val/reward'
    with pytest.raises(UserError, match=said):
        callback.on_validation_end(Trainer(), RLModule(), 0, {"val/reward": 0.0, "val/accuracy": 0.0})


def test_a_metric_that_a_step_leaves_out_is_not_missed_once_it_was_seen() -> None:
    trainer, callback = Trainer(), EarlyStopping("reward/format", patience=1)
    callback.on_step_end(trainer, RLModule(), 1, {"reward/format": 0.5})
    resumed = EarlyStopping("reward/format", patience=1)
    resumed.load_state_dict(json.loads(json.dumps(callback.state_dict())))
    for each in (callback, resumed):
        each.on_step_end(trainer, RLModule(), 2, {"reward/mean": 0.5})
    assert not trainer.should_stop


def test_without_a_rule_to_stop_by_it_is_refused() -> None:
    with pytest.raises(UserError, match="has no `patience`, `stopping_threshold` or `divergence_threshold`"):
        EarlyStopping("val/accuracy", patience=None)


def test_a_resumed_run_remembers_the_best_value_and_the_looks_since() -> None:
    before = EarlyStopping("val/accuracy", mode="max")
    assert stops_after(before, [0.5, 0.4, 0.4]) is None
    after = EarlyStopping("val/accuracy", mode="max")
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert stops_after(after, [0.4]) == 1
