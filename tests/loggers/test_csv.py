"""`metrics.csv`."""

from __future__ import annotations

import csv
from pathlib import Path

from rlflow.loggers import CSVLogger


def table(folder: Path) -> list[list[str]]:
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_the_header_names_the_metrics(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.start(tmp_path)
    logger.log_metrics({"reward/mean": 0.5}, step=1)
    logger.finish()
    assert table(tmp_path) == [["step", "reward/mean"], ["1", "0.5"]]


def test_a_metric_that_comes_later_widens_the_header_and_keeps_earlier_rows(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.start(tmp_path)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.log_metrics({"b": 2.0}, step=2)
    logger.log_metrics({"a": 3.0, "b": 4.0}, step=3)
    logger.finish()
    assert table(tmp_path) == [["step", "a", "b"], ["1", "1.0", ""], ["2", "", "2.0"], ["3", "3.0", "4.0"]]


def test_numbers_come_back_to_the_bit(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.start(tmp_path)
    logger.log_metrics({"a": 0.1 + 0.2}, step=1)
    assert float(table(tmp_path)[1][1]) == 0.1 + 0.2


def test_a_run_that_goes_on_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
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
