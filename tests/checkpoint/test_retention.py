"""The checkpoints that stay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rlflow.checkpoint import Retention
from rlflow.errors import UserError
from rlflow.models.tiny import write_tiny_model
from rlflow.settings import Settings
from rlflow.trainer import Trainer
from tests.checkpoint.test_checkpoint import StopAfter
from tests.controller.runs import Fit, failing_fit, fit, grpo, sums

VALUES = {1: 0.5, 2: 0.9, 3: None, 4: 0.1, 5: math.nan, 6: 0.5, 7: 0.3}


def staying(**given: Any) -> list[int]:
    values = {Path(str(step)): value for step, value in VALUES.items()}
    return [int(path.name) for path in Retention(**given).staying(values)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"last": 2}, [6, 7]),
        ({"last": 3, "top_k": -1}, [1, 2, 3, 4, 5, 6, 7]),
        ({"last": 2, "top_k": 1, "monitor": "loss"}, [4, 6, 7]),
        ({"last": 2, "top_k": 2, "monitor": "loss"}, [4, 6, 7]),  # the second best, 0.3, is among the last
        ({"last": 2, "top_k": 2, "monitor": "reward", "mode": "max"}, [2, 6, 7]),  # of two with 0.5 the later is better
        ({"last": 2, "top_k": 3, "monitor": "reward", "mode": "max"}, [1, 2, 6, 7]),
        ({"last": 2, "top_k": 9, "monitor": "loss"}, [1, 2, 4, 6, 7]),  # NaN is never good
    ],
)
def test_the_last_ones_and_the_best_stay(given: dict[str, Any], expected: list[int]) -> None:
    assert staying(**given) == expected


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"save_last": 1}, "`trainer.save_last` is 1; give 2 or more"),
        ({"save_top_k": -2}, "`trainer.save_top_k` is -2; give a number of checkpoints, or -1 for all"),
        ({"save_top_k": 1}, "`trainer.save_top_k` is 1 and `trainer.monitor` is not set"),
        ({"monitor": "loss"}, "`trainer.monitor` is 'loss' and `trainer.save_top_k` is 0"),
        ({"save_top_k": -1}, "`trainer.save_top_k` is -1, and no checkpoint is written; set `trainer.save_every_n"),
        ({"save_every_seconds": 0.0}, "`trainer.save_every_seconds` is 0.0; give more than 0"),
    ],
)
def test_settings_that_keep_nothing_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refused:
        Settings(**given)
    assert says in str(refused.value)


def test_a_metric_may_say_which_checkpoint_is_best_though_none_stays_for_it() -> None:
    assert Settings(monitor="loss", ckpt_path="best").save_top_k == 0


def test_save_last_true_keeps_two_checkpoints() -> None:
    assert Trainer(save_last=True).save_last == 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("retention") / "tiny")


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoint").iterdir())


def run_of(model: Path, folder: Path, **settings: Any) -> Fit:
    given = {"max_steps": 6, "save_every_n_steps": 1, **settings}
    return Fit(grpo(model, max_response_length=4), sums(8, 2), folder, settings=given)


def test_a_resumed_run_knows_the_previous_values(model: Path, tmp_path: Path) -> None:
    best = {"save_top_k": 1, "monitor": "time/step", "mode": "min"}
    fit(run_of(model, tmp_path, max_steps=3, save_top_k=-1))
    assert steps(tmp_path) == [1, 2, 3]
    fit(run_of(model, tmp_path, max_steps=4, ckpt_path="last", **best))
    assert steps(tmp_path) == [3, 4]  # none of before was measured
    fit(run_of(model, tmp_path, max_steps=6, ckpt_path="last", **best))
    assert len(steps(tmp_path)) in (2, 3)
    assert steps(tmp_path)[-2:] == [5, 6]


def test_a_metric_that_is_not_logged_ends_the_run_after_its_first_step(model: Path, tmp_path: Path) -> None:
    run = run_of(model, tmp_path, save_top_k=1, monitor="reward/men")
    ended = failing_fit(run)
    assert ended.error.startswith("`trainer.monitor` is 'reward/men', which this run does not log. Did you mean")
    assert len(ended.steps) == 1


def test_a_metric_of_a_role_that_is_trained_later_may_be_monitored(model: Path, tmp_path: Path) -> None:
    later = grpo(model, max_response_length=4, start_step=2)
    monitored = {"save_top_k": 1, "monitor": "actor/loss", "max_steps": 4, "save_every_n_steps": 1}
    assert len(fit(Fit(later, sums(8, 2), tmp_path, settings=monitored)).steps) == 4


def test_checkpoints_are_written_by_time(model: Path, tmp_path: Path) -> None:
    fit(run_of(model, tmp_path / "always", save_every_n_steps=None, save_every_seconds=1e-6, save_top_k=-1))
    assert steps(tmp_path / "always") == [1, 2, 3, 4, 5, 6]
    run = run_of(model, tmp_path / "never", save_every_n_steps=None, save_every_seconds=1e6, callbacks=[StopAfter(2)])
    fit(run)
    assert steps(tmp_path / "never") == [2]  # the last step's
