"""Rotten data ends with exit code 2 and one line that names the file and the row, before a model is loaded."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from rlflow.data import JSONL
from rlflow.errors import UserError
from rlflow.models.causal_lm import ScoringModel
from tests.bad_input.refusal import refusal
from tests.own_folder import FILES, ROWS, forgotten, make, write
from tests.slow import slow_but

pytestmark = pytest.mark.row("bad data")
GOOD = FILES["rows.jsonl"].encode()
CHAT = {"data.chat_template": True}
SFT = {"module": {"class_path": "rlflow.algorithms.SFT", "init_args": {"actor": "tiny"}}, "data.response": "answer"}
TALK = {**SFT, **CHAT}
FILES_REFUSED = "files or folders that are not data, or damaged, refused in one line"
TABLE = pyarrow.table({"question": ["1+1="] * 8, "answer": ["2"] * 8})


def row(**columns: Any) -> bytes:
    return GOOD + json.dumps(columns).encode() + b"\n"


def said(*messages: Any) -> bytes:
    return row(question=list(messages), answer="1")


TEXTS: list[tuple[str, bytes, dict[str, Any], str]] = [
    ("a torn line", GOOD + b'{"question": "1', {}, "x.jsonl, line 9 is not JSON"),
    ("a list", GOOD + b"[1]\n", {}, "x.jsonl, line 9 is not a JSON object"),
    ("null", GOOD + b"null\n", {}, "x.jsonl, line 9 is not a JSON object"),
    ("half a character", GOOD + b'{"question": "\\ud800", "answer": "1"}\n', {}, "x.jsonl, line 9 is not JSON"),
    ("half a character of an answer", GOOD + b'{"question": "1", "answer": "\\ud800"}\n', {}, "line 9 is not JSON"),
    ("deep lists", GOOD + b'{"question": "1", "answer": ' + b"[" * 10**5 + b"]" * 10**5 + b"}\n", {}, "line 9 is not"),
    ("null bytes", GOOD + b'{"question": "1\x00", "answer": "2"}\n', {}, "line 9 is not JSON"),
    ("no prompt", row(answer="1"), {}, "x.jsonl, line 9 has no column `question`"),
    ("a null prompt", row(question=None), {}, "line 9: column `question` is None, not a text"),
    ("an empty prompt", row(question=""), {}, "x.jsonl, line 9: the prompt is empty"),
    ("a prompt of blanks", row(question="     ", answer="1"), {}, "x.jsonl, line 9: the prompt is blank"),
    ("a blank user's turn", row(question=" ", answer="1"), CHAT, "x.jsonl, line 9: the prompt is blank"),
    ("no answer", row(question="1+1="), {}, "x.jsonl, line 9 has no column `answer`, which the reward reads"),
    (
        "a null answer",
        row(question="1+1=", answer=None),
        {},
        "line 9: column `answer`, which the reward reads, is null",
    ),
    (
        "a key that stands twice",
        GOOD + b'{"question": "1", "answer": "1", "answer": "2"}\n',
        {},
        "the key 'answer' twice",
    ),
    ("a number", row(question=3), {}, "line 9: column `question` is 3, not a text"),
    ("NaN", row(question=float("nan")), {}, "line 9: column `question` is nan, not a text"),
    ("a mapping", row(question={"a": 1}), {}, "line 9: column `question` is {'a': 1}, not a text"),
    ("a long prompt", row(question="1" * 600, answer="1"), {}, "the first of them x.jsonl, line 9"),
    ("UTF-16", FILES["rows.jsonl"].encode("utf-16"), {}, "is not JSON"),
    ("Latin-1", GOOD + b'{"question": "\xe9"}\n', {}, "x.jsonl, line 9 is not JSON"),
    ("a compressed file that is torn", b"\x1f\x8b\x08\x00abc", {}, "x.jsonl, line 1 is not JSON"),
    ("CSV", b"question,answer\n1+1=,2\n", {}, "x.jsonl, line 1 is not JSON"),
    ("one JSON list", json.dumps(ROWS).encode(), {}, "x.jsonl, line 1 is not a JSON object"),
    ("quotes of Python", b"{'question': '1'}\n", {}, "x.jsonl, line 1 is not JSON"),
    ("two rows in a line", b"{}{}\n", {}, "x.jsonl, line 1 is not JSON"),
    ("5,000 digits", GOOD + b'{"question": ' + b"9" * 5000 + b"}\n", {}, "x.jsonl, line 9 is not JSON"),
    ("a page of the web", b"<html>404</html>", {}, "x.jsonl, line 1 is not JSON"),
    ("zeros", bytes(2000), {}, "x.jsonl, line 1 is not JSON"),
    ("codes in a column", GOOD + b'{"a\\u001b[2J": 1}\n', {}, r"columns found: a\x1b[2J"),
    ("a forged line", GOOD + b'{"a\\nrlflow: error: forged": 1}\n', {}, r"columns found: a\nrlflow: error: forged"),
    ("a message without a role", said({"content": "x"}), CHAT, "not messages with role and content"),
    ("a message without content", said({"role": "user"}), CHAT, "not messages with role and content"),
    ("null content", said({"role": "user", "content": None}), CHAT, "not messages with role and content"),
    ("content that is a number", said({"role": "user", "content": 3}), CHAT, "not messages with role and content"),
    ("a null role", said({"role": None, "content": "x"}), CHAT, "not messages with role and content"),
    ("no messages", said(), CHAT, "x.jsonl, line 9: the model's chat template refuses the messages"),
    ("texts for messages", said("hi"), CHAT, "not messages with role and content"),
    ("a null message", said(None), CHAT, "not messages with role and content"),
    ("no response", row(question="1"), SFT, "x.jsonl, line 9 has no column `answer`"),
    ("a null response", row(question="1", answer=None), SFT, "line 9: column `answer` is None, not a text"),
    ("a number for a response", row(question="1", answer=float("nan")), SFT, "line 9: column `answer` is nan"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("own")
    make(folder)
    (folder / "empty").mkdir()
    (folder / "saved").mkdir()
    (folder / "saved" / "dataset_info.json").write_text("{")
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")
    parquet.write_table(TABLE, folder / "good.parquet")
    with forgotten(folder):  # `main` puts the folder on the path
        yield folder


@pytest.fixture
def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def line(kind: str, path: str, changes: dict[str, Any] | None = None) -> str:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", sys.path.copy())
        loaded: list[Path] = []
        monkeypatch.setattr(ScoringModel, "load", lambda path, *_: loaded.append(path))
        source = {"class_path": f"rlflow.data.{kind}", "init_args": {"path": path}}
        write(folder / "my.yaml", {**(changes or {}), "data.train": source})
        found = refusal(capfd, "fit", "--config", "my.yaml")
        assert loaded == []
        return found

    return line


QUICK = [*TEXTS[::4], *(each for each in TEXTS if each[0] == "deep lists")]  # no other test reads such a line


@pytest.mark.parametrize(
    ("name", "content", "changes", "line"), slow_but(QUICK, TEXTS), ids=[name for name, *_ in TEXTS]
)
def test_a_rotten_row_is_refused_with_its_file_and_line(
    name: str,
    content: bytes,
    changes: dict[str, Any],
    line: str,
    folder: Path,
    refused: Callable[..., str],
    counted: Callable[..., None],
) -> None:
    (folder / "x.jsonl").write_bytes(content)
    found = refused("JSONL", "x.jsonl", changes)
    assert line in found
    assert re.search(r"\bx\.jsonl, line \d", found), found
    counted("kinds of bad rows, refused in one line with file and row", name)


IS = {
    "empty": "which is a folder without a .jsonl file",
    "fifo": "which is a device or a pipe",
    "/dev/zero": "which is a device or a pipe",
    "": "which names nothing",
}


EMPTY = {"nothing": b"", "blank lines": b"\n \n"}


@pytest.mark.parametrize("content", EMPTY.values(), ids=EMPTY.keys())
def test_a_file_without_rows_is_refused_by_its_name(
    content: bytes, folder: Path, refused: Callable[..., str], counted: Callable[[str], None]
) -> None:
    (folder / "x.jsonl").write_bytes(content)
    assert refused("JSONL", "x.jsonl").startswith("x.jsonl has no rows")
    counted(FILES_REFUSED)


SOURCES = ("JSONL", "Parquet", "HuggingFace")
PATHS = ("empty", "fifo", "/dev/zero", "loop", "", "a" * 5000)


@pytest.mark.parametrize(
    ("path", "kind"), slow_but([*itertools.product(PATHS, SOURCES)][::4], itertools.product(PATHS, SOURCES))
)
def test_what_is_not_a_dataset_is_refused_and_nothing_hangs(
    kind: str, path: str, refused: Callable[..., str], counted: Callable[[str], None]
) -> None:
    line = refused(kind, path)
    named = {"JSONL": IS, "Parquet": {name: IS[name] for name in ("fifo", "/dev/zero", "")}}.get(kind, {})
    assert f"{named[path]}; give a" in line if path in named else "check" in line or "has no rows" in line
    counted(FILES_REFUSED)


ROTS = ("empty", "cut", "head", "data", "footer")


@pytest.mark.parametrize("rot", ROTS)
def test_rotten_parquet_is_refused_with_its_file(
    rot: str, folder: Path, refused: Callable[..., str], counted: Callable[[str], None]
) -> None:
    good = (folder / "good.parquet").read_bytes()
    flipped = bytes(byte ^ 0xFF for byte in good[4:60])
    rotten = {
        "empty": b"",
        "cut": good[:-50],
        "head": good[50:],
        "data": good[:4] + flipped + good[60:],
        "footer": b"PAR1" + bytes(50) + b"PAR1",
    }
    (folder / "x.parquet").write_bytes(rotten[rot])
    assert "x.parquet" in refused("Parquet", "x.parquet")
    counted(FILES_REFUSED)


def test_a_torn_saved_dataset_is_refused_with_its_folder(
    refused: Callable[..., str], counted: Callable[[str], None]
) -> None:
    assert refused("HuggingFace", "saved").startswith("saved cannot be loaded (")
    counted(FILES_REFUSED)


def test_a_file_that_gets_shorter_while_it_is_read_is_an_error_and_no_signal(
    tmp_path: Path, seen: Callable[[str], None]
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(GOOD)
    source = JSONL(str(file))
    assert source[0] == ROWS[0]
    file.write_bytes(b"")
    with pytest.raises(UserError, match="line 8 is gone: the file got shorter while the run read it"):
        source[7]
    seen("a file that gets shorter named with its row")


def test_more_than_forty_kinds_of_bad_data_are_tried() -> None:
    assert len({name for name, *_ in TEXTS}) + len(EMPTY) + len(SOURCES) * len(PATHS) + len(ROTS) + 2 > 40
