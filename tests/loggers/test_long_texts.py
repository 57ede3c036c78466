"""What is shown of texts of megabytes, and how long it takes to look for secrets in them."""

from __future__ import annotations

import time

import pytest

from rlflow.errors import READ, SHOWN, one_line
from rlflow.loggers.secrets import WHOLE, shown, text_without_secrets, without_secrets
from rlflow.worker import child

MOST_S = 10.0  # it takes less than one
# What parts of the patterns match, as often as it fits: a pattern that is tried from each of them takes hours.
PARTS = [
    *"y7'\".-/ =:\\`[({\n_",
    "a ",
    "a:",
    "a=",
    "a.",
    "-a",
    "--a ",
    "--a','",
    "a_key:",
    "tokens:",
    "aB1",
    "{a: ",
    "[1, ",
]
PARTS += ["password", "password=", "password='", "password: [", "'password', ", "--password ", "tokens: [", "A_KEY="]
PARTS += [
    "eyJaaaaaaaa-",
    "eyJaaaaaaaa.",
    "SG.aaaaaaaaaa",
    "sk-",
    "sk-a",
    "hf_",
    "dapi0",
    "pypi-",
    "://",
    "://a",
    "?a=",
    "?token",
]
PARTS += ["Bearer ", "Bearer aaaa ", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "PRIVATE ", "-----END ", "- a\n"]
TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsT"


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("before", ["", "password: ", "eyJ", "Basic "])
def test_secrets_are_looked_for_in_a_time_that_is_that_of_the_text(before: str, part: str) -> None:
    text = (before + part * 50_000)[:100_000]
    began = time.monotonic()
    text_without_secrets(text)
    assert time.monotonic() - began < MOST_S


@pytest.mark.parametrize("text", ["y" * 50_000_000, "y " * 25_000_000, "a=b" * 10_000_000])
def test_of_a_line_of_megabytes_the_beginning_and_the_end_are_shown(text: str) -> None:
    began = time.monotonic()
    line = shown(f"it raised {text}; mend it")
    assert time.monotonic() - began < MOST_S
    assert len(line) < 5_000
    assert line.startswith(f"it raised {text[:1000]}")
    assert line.endswith(f"{text[-500:]}; mend it")
    assert " letters more) ... " in line


def test_what_is_of_normal_length_is_shown_as_it_is() -> None:
    lines = "\n".join(f'  File "a.py", line {i}, in <module>' for i in range(200))
    assert shown(lines) == lines
    assert shown("y " * 2_000) == "y " * 2_000
    assert one_line(ValueError("y " * 2_000)) == ("y " * 2_000).strip()


@pytest.mark.parametrize("most", [WHOLE, READ, SHOWN, 1000])
@pytest.mark.parametrize("secret", [TOKEN, f"https://me:{TOKEN[3:]}@h.org", f"password='open {TOKEN[3:]}' x"])
def test_no_half_of_a_secret_is_shown_wherever_a_message_is_cut(secret: str, most: int) -> None:
    for cut in range(0, len(secret), 3):
        text = "y" * 20 + " " * (most - 20 - cut) + secret + " y" * WHOLE
        of_worker = child._raised(ValueError(text))["text"]
        for line in (one_line(ValueError(text)), one_line(ValueError(of_worker)), text):
            assert "aBcD" not in shown(line)


def test_a_config_s_value_of_megabytes_takes_no_time() -> None:
    began = time.monotonic()
    without_secrets({"a": "y" * 5_000_000, "b": ["y" * 5_000_000, 3], "y" * 5_000_000: 1})
    assert time.monotonic() - began < MOST_S
