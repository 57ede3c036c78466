"""`metrics.jsonl` and `samples.jsonl`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rlflow.loggers import JSONLLogger
from rlflow.loggers.jsonl import read_metrics


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_holds_the_step_and_its_metrics(tmp_path: Path) -> None:
    logger = JSONLLogger()
    logger.start(tmp_path)
    logger.log_metrics({"reward/mean": 0.5, "actor/kl": 0.25}, step=1)
    logger.finish()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5, "actor/kl": 0.25}]


def test_a_line_is_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    logger = JSONLLogger()
    logger.start(tmp_path)
    logger.log_metrics({"reward/mean": 0.5}, step=1)
    assert read_metrics(tmp_path) == [{"step": 1, "reward/mean": 0.5}]
    logger.finish()


def test_what_json_has_no_number_for_is_null(tmp_path: Path) -> None:
    logger = JSONLLogger()
    logger.start(tmp_path)
    logger.log_metrics({"actor/grad_norm": math.nan, "actor/kl": math.inf}, step=1)
    logger.finish()
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert read_metrics(tmp_path) == [{"step": 1, "actor/grad_norm": None, "actor/kl": None}]


def test_samples_keep_their_order_and_every_character(tmp_path: Path) -> None:
    logger = JSONLLogger()
    logger.start(tmp_path)
    logger.log_samples([{"prompt": "1+1=", "response": "2\n"}, {"prompt": "π", "response": '"'}], step=4)
    logger.finish()
    assert lines(tmp_path / "samples.jsonl") == [
        {"step": 4, "prompt": "1+1=", "response": "2\n"},
        {"step": 4, "prompt": "π", "response": '"'},
    ]


def test_a_run_that_goes_on_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    for first_step, steps, value in ((0, (1, 2, 3), 0.0), (2, (2, 3, 4), 1.0)):
        logger = JSONLLogger()
        logger.start(tmp_path, first_step)
        for step in steps:
            logger.log_metrics({"x": value}, step)
            logger.log_samples([{"x": value}], step)
        logger.finish()
    expected = [{"step": 1, "x": 0.0}, {"step": 2, "x": 1.0}, {"step": 3, "x": 1.0}, {"step": 4, "x": 1.0}]
    assert lines(tmp_path / "metrics.jsonl") == expected
    assert lines(tmp_path / "samples.jsonl") == expected


def test_a_line_that_a_killed_run_left_unfinished_does_not_stop_its_continuation(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": 0.0}\n{"step": 2, "x"')
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "x": 0.0}\n{"ste')
    logger = JSONLLogger()
    logger.start(tmp_path, first_step=2)
    logger.log_metrics({"x": 1.0}, step=2)
    logger.finish()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 0.0}, {"step": 2, "x": 1.0}]
    assert lines(tmp_path / "samples.jsonl") == [{"step": 1, "x": 0.0}]
