"""A setting that has changed since a run was begun is reported if it changes numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rlflow.run.resume import WITH_EFFECT, changed_settings
from rlflow.settings import Settings

CONFIG: dict[str, Any] = {
    "module": {
        "class_path": "rlflow.algorithms.GRPO",
        "init_args": {
            "actor": {"class_path": "rlflow.CausalLM", "init_args": {"optimizer": {"lr": 0.1, "schedule": "constant"}}},
            "group_size": 2,
        },
    },
    "data": {"prompts_per_step": 4, "train": {"path": "rows.jsonl"}},
    "trainer": {"max_steps": 3, "devices": 2, "run_dir": "runs/a", "max_staleness": 0},
    "rollout": {"class_path": "rlflow.rollout.TransformersEngine", "init_args": {"max_batch": 256}},
}
LR = "module.init_args.actor.init_args.optimizer.lr"
SCHEDULE = "module.init_args.actor.init_args.optimizer.schedule"


def changed(*changes: tuple[str, Any], before: tuple[tuple[str, Any], ...] = ()) -> list[str]:
    return changed_settings(config(before), config(changes), "step-00000002")


def config(changes: Any) -> dict[str, Any]:
    made = copy.deepcopy(CONFIG)
    for key, value in changes:
        *above, last = key.split(".")
        place = made
        for name in above:
            place = place[name]
        place[last] = value
    return made


def test_an_equal_config_is_reported_with_nothing() -> None:
    assert changed() == []


@pytest.mark.parametrize(
    ("key", "value", "was"),
    [(LR, 0.2, 0.1), ("data.prompts_per_step", 8, 4), ("module.init_args.group_size", 4, 2)],
)
def test_a_changed_setting_is_reported_with_both_values(key: str, value: Any, was: Any) -> None:
    assert changed((key, value)) == [
        f"`{key}` is {value} and was {was} when step-00000002 was written: the steps from here on have other numbers"
    ]


def test_each_of_several_has_a_line() -> None:
    assert [line.split()[0] for line in changed((LR, 1), ("trainer.max_staleness", 1))] == [
        f"`{LR}`",
        "`trainer.max_staleness`",
    ]


@pytest.mark.parametrize(
    "key", ["trainer.devices", "trainer.run_dir", "data.train", "trainer.max_steps", "trainer.max_epochs"]
)
def test_what_changes_no_number_is_not_reported(key: str) -> None:
    assert changed((key, "other")) == []


def test_the_number_of_steps_is_reported_where_the_learning_rate_ends_with_them() -> None:
    decays = ((SCHEDULE, "cosine"),)
    (line,) = changed(*decays, ("trainer.max_steps", 5), before=decays)
    assert line.startswith("`trainer.max_steps` is 5 and was 3")
    (line,) = changed(*decays, ("trainer.max_epochs", 2), before=decays)
    assert line.startswith("`trainer.max_epochs` is 2 and was null")


def test_a_setting_of_a_mixture_is_reported_and_where_its_rows_are_is_not() -> None:
    before = {"sums": {"data": "sums.jsonl", "weight": 1.0, "sampling": {"temperature": 1.0}}}
    now = {"sums": {"data": "moved.jsonl", "weight": 2.0, "sampling": {"temperature": 0.5}}}
    first, second = changed(("data.train", {"datasets": now}), before=(("data.train", {"datasets": before}),))
    assert first.startswith("`data.train.datasets.sums.weight` is 2.0 and was 1.0")
    assert second.startswith("`data.train.datasets.sums.sampling.temperature` is 0.5")
    rows_alone = (("data.train", {"datasets": {"sums": "sums.jsonl"}}),)
    (line,) = changed(("data.train", {"datasets": {"sums": before["sums"]}}), before=rows_alone)
    assert line.startswith("`data.train.datasets.sums.sampling` is {'temperature': 1.0} and was null")


def test_of_another_class_the_class_alone_is_reported() -> None:
    (line,) = changed(("rollout", {"class_path": "rlflow.rollout.VLLMEngine", "init_args": {}}))
    assert "`rollout.class_path` is rlflow.rollout.VLLMEngine and was rlflow.rollout.TransformersEngine" in line


def test_of_each_setting_of_the_trainer_it_is_known_whether_it_changes_numbers() -> None:
    outside = {"placement", "seed"}  # sections of their own in a config
    with_effect = {key.removeprefix("trainer.") for key in WITH_EFFECT}
    outputs = ["run_dir", "log_every_n_steps", "dump_steps", "dump_nodes", "fast_dev_run"]
    outputs += ["log_samples", "log_samples_every_n_steps", "profiler"]
    lengths = ["max_seconds", "grace_s", "max_skipped", "logprob_gap_limit"]
    ranks = ["devices", "num_nodes", "accelerator", "balance", "sync_bucket_bytes"]
    validation = ["val_check_interval", "limit_val_batches", "val_samples", "val_sampling"]
    checkpoints = ["save_every_n_steps", "save_every_seconds", "save_last", "save_top_k", "monitor", "mode"]
    checkpoints += ["async_save", "ckpt_path"]
    without = [*outputs, *lengths, *ranks, *validation, *checkpoints]
    assert sorted([*without, *with_effect, *outside]) == sorted(Settings.__dataclass_fields__)
