"""Texts of megabytes: what is shown of them, and how long that takes."""

from __future__ import annotations

import time

import pytest

from rlflow.errors import one_line, shown
from rlflow.loggers.secrets import arguments_without_secrets, without_secrets

MOST_S = 10.0  # it takes less than one


@pytest.mark.parametrize("text", ["y" * 50_000_000, "y " * 25_000_000, "a=b" * 10_000_000])
def test_of_a_line_of_megabytes_the_beginning_and_the_end_are_shown(text: str) -> None:
    began = time.monotonic()
    line = shown(f"it raised {text}; correct it")
    assert time.monotonic() - began < MOST_S
    assert len(line) < 5_000
    assert line.startswith(f"it raised {text[:1000]}")
    assert line.endswith(f"{text[-500:]}; correct it")
    assert " letters more) ... " in line


def test_of_another_library_s_error_of_megabytes_the_beginning_and_the_end_are_read() -> None:
    began = time.monotonic()
    line = one_line(ValueError("first " + "y\n" * 25_000_000 + "last"))
    assert time.monotonic() - began < MOST_S
    assert len(line) < 20_000
    assert (line[:6], line[-5:]) == ("first ", " last")


def test_what_is_of_normal_length_is_shown_as_it_is() -> None:
    lines = "\n".join(f'  File "a.py", line {i}, in <module>' for i in range(200))
    assert shown(lines) == lines
    assert shown("y " * 2_000) == "y " * 2_000
    assert one_line(ValueError("y " * 2_000)) == ("y " * 2_000).strip()


def test_a_config_s_value_of_megabytes_takes_no_time() -> None:
    began = time.monotonic()
    without_secrets({"a": "y" * 5_000_000, "b": ["y" * 5_000_000, 3], "y" * 5_000_000: 1})
    arguments_without_secrets(["--a", "{a: " * 1_000_000, f"--{'a_key' * 1_000_000}", "a: b, " * 1_000_000])
    assert time.monotonic() - began < MOST_S
