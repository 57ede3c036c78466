"""`metrics.jsonl` and `samples.jsonl`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlflow.errors import UserError
from rlflow.loggers import JSONLLogger
from rlflow.loggers.jsonl import read_metrics, read_samples


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_holds_the_step_and_its_metrics(tmp_path: Path) -> None:
    logger = JSONLLogger()
    logger.start(tmp_path)
    logger.log_metrics({"reward/mean": 0.5, "actor/kl": 0.25}, step=1)
    logger.finalize("success")
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5, "actor/kl": 0.25}]


def test_a_line_is_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    logger = JSONLLogger()
    logger.start(tmp_path)
    logger.log_metrics({"reward/mean": 0.5}, step=1)
    assert read_metrics(tmp_path) == [{"step": 1, "reward/mean": 0.5}]
    logger.finalize("success")


def test_what_json_has_no_number_for_is_null(tmp_path: Path) -> None:
    logger = JSONLLogger()
    logger.start(tmp_path)
    logger.log_metrics({"actor/grad_norm": math.nan, "actor/kl": math.inf}, step=1)
    logger.finalize("success")
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert read_metrics(tmp_path) == [{"step": 1, "actor/grad_norm": None, "actor/kl": None}]


def test_metrics_added_by_a_callback_are_numbers_and_do_not_change_the_step(tmp_path: Path) -> None:
    logger = JSONLLogger()
    logger.start(tmp_path)
    logger.log_metrics({"flag": True, "step": 7.5}, step=1)
    logger.finalize("success")
    assert read_metrics(tmp_path) == [{"step": 1, "flag": 1.0}]


def test_samples_keep_their_order_and_every_character(tmp_path: Path) -> None:
    logger = JSONLLogger()
    logger.start(tmp_path)
    logger.log_samples([{"prompt": "1+1=", "response": "2\n"}, {"prompt": "π", "response": '"'}], step=4)
    logger.finalize("success")
    assert lines(tmp_path / "samples.jsonl") == [
        {"step": 4, "prompt": "1+1=", "response": "2\n"},
        {"step": 4, "prompt": "π", "response": '"'},
    ]


def test_half_a_character_in_a_sample_is_replaced(tmp_path: Path) -> None:
    logger = JSONLLogger()
    logger.start(tmp_path)
    logger.log_samples([{"messages": [{"tool_calls": [{"arguments": {"word": "a\ud83d"}}]}]}], step=1)
    logger.finalize("success")
    (sample,) = read_samples(tmp_path)
    assert sample["messages"] == [{"tool_calls": [{"arguments": {"word": "a?"}}]}]


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    for first_step, steps, value in ((0, (1, 2, 3), 0.0), (2, (2, 3, 4), 1.0)):
        logger = JSONLLogger()
        logger.start(tmp_path, first_step)
        for step in steps:
            logger.log_metrics({"x": value}, step)
            logger.log_samples([{"x": value}], step)
        logger.finalize("success")
    expected = [{"step": 1, "x": 0.0}, {"step": 2, "x": 1.0}, {"step": 3, "x": 1.0}, {"step": 4, "x": 1.0}]
    assert lines(tmp_path / "metrics.jsonl") == expected
    assert lines(tmp_path / "samples.jsonl") == expected


def test_a_line_that_a_killed_run_left_unfinished_does_not_stop_its_continuation(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": 0.0}\n{"step": 2, "x"')
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "x": 0.0}\n{"ste')
    logger = JSONLLogger()
    logger.start(tmp_path, first_step=2)
    logger.log_metrics({"x": 1.0}, step=2)
    logger.finalize("success")
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 0.0}, {"step": 2, "x": 1.0}]
    assert lines(tmp_path / "samples.jsonl") == [{"step": 1, "x": 0.0}]


WHOLE = '{"step": 1, "x": 0.0}\n'
DAMAGED = {
    "broken": b'{"step": 1, "x"\n',
    "zeros": bytes(64) + b'{"step": 1, "x": 0.0}\n',
    "no UTF-8": b'{"step": 1, "x": "\xff"}\n',
    "no object": b"7\n",
    "no step": b'{"stfp": 1}\n',
    "no number for a step": b'{"step": "1"}\n',
    "too deep": b"[" * 100_000 + b"\n",
}


def go_on(folder: Path) -> list[str]:
    """Continue a run with step 2; what it warns of."""
    logger = JSONLLogger()
    logger.start(folder, first_step=2)
    logger.log_metrics({"x": 1.0}, step=2)
    logger.log_samples([{"x": 1.0}], step=2)
    logger.finalize("success")
    return logger.warnings


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_line_is_left_out_by_a_resumed_run(tmp_path: Path, line: bytes, name: str) -> None:
    file, aside = tmp_path / name, tmp_path / f"{name}.damaged"
    before = line + WHOLE.encode() + b'{"step": 2, "x": 0.0}\n'
    file.write_bytes(before)
    assert go_on(tmp_path) == [
        f"warning: {file} is damaged: line 1 cannot be read; it is renamed to {name}.damaged, and the run continues"
        " with the lines that can be read"
    ]
    assert lines(file) == [{"step": 1, "x": 0.0}, {"step": 2, "x": 1.0}]
    assert aside.read_bytes() == before
    assert go_on(tmp_path) == []


def test_files_that_are_damaged_again_are_all_kept(tmp_path: Path) -> None:
    for text in ("a\n", "b\nb\n", "c\n"):
        (tmp_path / "metrics.jsonl").write_text(text)
        (warning,) = go_on(tmp_path)
        assert ("2 lines, the first of them line 1, cannot be read" in warning) == (text == "b\nb\n")
    kept = {file.name: file.read_text() for file in tmp_path.glob("metrics.jsonl.*")}
    assert kept == {
        "metrics.jsonl.damaged": "a\n",
        "metrics.jsonl.damaged-1": "b\nb\n",
        "metrics.jsonl.damaged-2": "c\n",
    }


def test_a_file_of_nothing_but_zeros_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_bytes(bytes(4096))
    (warning,) = go_on(tmp_path)
    assert "samples.jsonl is damaged: line 1 cannot be read" in warning


def test_what_cannot_be_opened_as_a_file_is_moved_away(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    (warning,) = go_on(tmp_path)
    assert "metrics.jsonl cannot be read (Is a directory)" in warning
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 2, "x": 1.0}]


def test_a_metric_that_is_not_a_number_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(WHOLE + '{"step": 1, "x": "0.5"}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl is damaged: line 2 is not what a run writes there; remove"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED)
def test_readers_name_the_damaged_line_and_its_file(tmp_path: Path, line: bytes) -> None:
    for name, read in (("metrics.jsonl", read_metrics), ("samples.jsonl", lambda folder: list(read_samples(folder)))):
        (tmp_path / name).write_bytes(WHOLE.encode() + line)
        with pytest.raises(UserError, match=rf"{tmp_path}/{name} is damaged: line 2 "):
            read(tmp_path)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be read \(No such file or directory\); repair"):
        read_metrics(tmp_path)
