"""`metrics.csv`."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from rlflow.loggers import CSVLogger


def table(folder: Path) -> list[list[str]]:
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_the_header_names_the_metrics(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.start(tmp_path)
    logger.log_metrics({"reward/mean": 0.5}, step=1)
    logger.finalize("success")
    assert table(tmp_path) == [["step", "reward/mean"], ["1", "0.5"]]


def test_a_metric_that_comes_later_widens_the_header_and_keeps_earlier_rows(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.start(tmp_path)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.log_metrics({"b": 2.0}, step=2)
    logger.log_metrics({"a": 3.0, "b": 4.0}, step=3)
    logger.finalize("success")
    assert table(tmp_path) == [["step", "a", "b"], ["1", "1.0", ""], ["2", "", "2.0"], ["3", "3.0", "4.0"]]


def test_a_name_of_more_than_a_line_keeps_the_rows_before_a_wider_header(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.start(tmp_path)
    logger.log_metrics({"a\nb": 1.0}, step=1)
    logger.log_metrics({"a\nb": 2.0, "c\u00a0d": 3.0}, step=2)
    logger.log_metrics({"e": 4.0}, step=3)
    logger.finalize("success")
    header = ["step", "a\\nb", "c\\xa0d", "e"]
    assert table(tmp_path) == [header, ["1", "1.0", "", ""], ["2", "2.0", "3.0", ""], ["3", "", "", "4.0"]]
    assert not logger.warnings


def test_metrics_added_by_a_callback_are_numbers_and_do_not_change_the_step(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.start(tmp_path)
    logger.log_metrics({"flag": True, "step": 7.5}, step=1)
    logger.finalize("success")
    assert table(tmp_path) == [["step", "flag"], ["1", "1.0"]]


def test_numbers_come_back_to_the_bit(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.start(tmp_path)
    logger.log_metrics({"a": 0.1 + 0.2}, step=1)
    assert float(table(tmp_path)[1][1]) == 0.1 + 0.2


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.start(tmp_path)
    for step in (1, 2, 3):
        logger.log_metrics({"a": 0.0}, step)
    later = CSVLogger()
    later.start(tmp_path, first_step=3)
    later.log_metrics({"a": 1.0}, step=3)
    assert table(tmp_path) == [["step", "a"], ["1", "0.0"], ["2", "0.0"], ["3", "1.0"]]


def test_a_row_that_a_killed_run_left_unfinished_does_not_stop_its_continuation(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,a\r\n1,0.0\r\n1")  # of 12
    logger = CSVLogger()
    logger.start(tmp_path, first_step=2)
    logger.log_metrics({"a": 1.0}, step=2)
    assert table(tmp_path) == [["step", "a"], ["1", "0.0"], ["2", "1.0"]]


def go_on(folder: Path) -> list[str]:
    """Continue a run with step 3; what it warns of."""
    logger = CSVLogger()
    logger.start(folder, first_step=3)
    logger.log_metrics({"a": 3.0}, step=3)
    return logger.warnings


@pytest.mark.parametrize(
    "row",
    [b"x,0.0", b",0.0", b"1", b"1,0.0,5", b"1,a", b"1,0.0\0", bytes(64), b"1,\xff", b'1,"0.0', b"9" * 200_000],
)
def test_a_damaged_row_is_left_out_by_a_resumed_run(tmp_path: Path, row: bytes) -> None:
    before = b"step,a\r\n" + row + b"\r\n2,0.0\r\n"
    (tmp_path / "metrics.csv").write_bytes(before)
    assert go_on(tmp_path) == [
        f"warning: {tmp_path}/metrics.csv is damaged: line 2 cannot be read; it is renamed to metrics.csv.damaged, and"
        " the run continues with the lines that can be read"
    ]
    assert table(tmp_path) == [["step", "a"], ["2", "0.0"], ["3", "3.0"]]
    assert (tmp_path / "metrics.csv.damaged").read_bytes() == before
    assert go_on(tmp_path) == []


@pytest.mark.parametrize("header", [b"stfp,a", b"a,step", b"step,a,a", b"\0\0\0\0,a", b"\xff\xfe", b"", b"1,0.0"])
def test_of_a_table_with_a_damaged_header_nothing_can_be_read(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "metrics.csv").write_bytes(header + b"\r\n1,0.0\r\n2,0.0\r\n")
    (warning,) = go_on(tmp_path)
    assert "metrics.csv is damaged: 3 lines, the first of them line 1, cannot be read; it is renamed to" in warning
    assert table(tmp_path) == [["step", "a"], ["3", "3.0"]]


def begun(folder: Path) -> CSVLogger:
    """A run that has recorded a step."""
    logger = CSVLogger()
    logger.start(folder)
    logger.log_metrics({"a": 1.0}, step=1)
    return logger


@pytest.mark.parametrize("row", [b"garbage", b"1,2,3,4", b"\xff\0", b'1,"0.0', b"9" * 200_000])
def test_a_row_that_is_damaged_during_a_run_is_left_out_when_a_metric_comes(tmp_path: Path, row: bytes) -> None:
    logger = begun(tmp_path)
    with (tmp_path / "metrics.csv").open("ab") as file:
        file.write(row + b"\r\n")
    logger.log_metrics({"a": 2.0}, step=2)
    logger.log_metrics({"b": 3.0}, step=3)
    assert table(tmp_path) == [["step", "a", "b"], ["1", "1.0", ""], ["2", "2.0", ""], ["3", "", "3.0"]]
    (warning,) = logger.warnings
    assert "metrics.csv is damaged: line 3 cannot be read; it is renamed to metrics.csv.damaged" in warning
    assert row in (tmp_path / "metrics.csv.damaged").read_bytes()


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_table_that_was_moved_away_during_a_run_is_started_again(tmp_path: Path, name: str) -> None:
    logger = begun(tmp_path)
    (tmp_path / "metrics.csv").rename(tmp_path / "mine.csv")
    logger.log_metrics({name: 2.0}, step=2)
    assert table(tmp_path) == [["step", name], ["2", "2.0"]]
    assert logger.warnings == [f"warning: {tmp_path}/metrics.csv is gone; a new one starts with step 2"]


def test_a_table_that_cannot_be_read_is_started_again_when_a_metric_is_added(tmp_path: Path) -> None:
    logger = begun(tmp_path)
    (tmp_path / "metrics.csv").unlink()
    (tmp_path / "metrics.csv").mkdir()
    logger.log_metrics({"b": 2.0}, step=2)
    assert table(tmp_path) == [["step", "b"], ["2", "2.0"]]
    assert "metrics.csv cannot be read (Is a directory)" in logger.warnings[0]
