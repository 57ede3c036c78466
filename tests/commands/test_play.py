"""`rlflow play`: environments of both forms, played by pipe, script and a person, without weights."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlflow.cli import main
from rlflow.models.tiny import write_tiny_model
from tests.own_folder import CONFIG

WORD, COUNT = "tests.environments.games.WordGame", "tests.environments.games.CountDown"
ROWS = [
    {"question": "Play.", "word": "house", "start": 1, "stones": 3},
    {"question": "Again.", "word": "a", "start": 2},
]
GUESS = '<tool_call>{"name": "guess", "arguments": {"word": "house"}}</tool_call>'


def config(folder: Path, name: str, environment: dict[str, Any] | None, **module: Any) -> str:
    path = folder / f"{name}.yaml"
    given = {"actor": {"model": str(folder / "model")}, "max_response_length": 400, **module}
    if environment is not None:
        kind = "Harness" if "run" in environment else "Environment"
        given["environment"] = {"class_path": f"rlflow.{kind}", "init_args": environment}
    source = {"class_path": "rlflow.data.JSONL", "init_args": {"path": str(folder / "rows.jsonl")}}
    data = {"train": source, "chat_template": True, "max_prompt_length": 1000}
    changed = {"module": {"class_path": "rlflow.algorithms.GRPO", "init_args": given}, "data": data}
    path.write_text(yaml.safe_dump(CONFIG | changed))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights, and data."""
    folder = tmp_path_factory.mktemp("play")
    for weights in write_tiny_model(folder / "model", layers=1).glob("*.safetensors"):
        weights.unlink()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def test_an_environment_of_tools_is_played_by_a_pipe(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{GUESS}\nIt is house.\n"))
    main(["play", "--config", config(folder, "word", {"environment": WORD})])
    output, errors = capsys.readouterr()
    assert errors == ""
    assert "Play. It has 5 letters.<|im_end|>" in output
    assert "guess(word)" in output.split("  policy")[0], "the template tells of the tool"
    assert output.count(GUESS + "<|im_end|>") == 1
    assert "right<|im_end|>" in output
    *_, turns, calls, rewards, ended, _ = output.split("\n")
    assert re.fullmatch(r"2 turns, \d+ of \d+ tokens by the policy", turns)
    assert calls == "tool calls: 1; 0 gave no value"
    assert rewards == "rewards of the environment: 0, 1 (sum 1)"
    assert ended == "ended: done, the policy called no tool"


class Slow(io.StringIO):
    def readline(self, size: int | None = -1, /) -> str:
        time.sleep(1.5)
        return super().readline(-1 if size is None else size)


def test_an_agent_waits_for_a_person_longer_than_its_seconds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Slow("It is house.\n"))
    agent = {"run": "tests.harness.agents.talks_once", "timeout_s": 1}
    main(["play", "--config", config(folder, "agent", agent)])
    assert "ended: done, the agent ended it" in capsys.readouterr().out


def test_an_environment_of_messages_is_played_by_a_person_who_leaves(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a terminal, by its keys: a line, and then the end of the input."""
    ours, theirs = pty.openpty()
    with ThreadPoolExecutor(1) as person, open(theirs) as keys, open(theirs, "w", closefd=False) as screen:
        seen = person.submit(types_two_and_leaves, ours)
        monkeypatch.setattr(sys, "stdin", keys)
        monkeypatch.setattr(sys, "stdout", screen)
        main(["play", "--config", config(folder, "count", {"environment": COUNT}), "--row", "1"])
        screen.flush()
        assert "count down from 2" in seen.result()
        assert "next<|im_end|>" in seen.result()
    os.close(ours)
    assert capsys.readouterr().err == ""


def types_two_and_leaves(terminal: int) -> str:
    """The screen of a person who types two turns and leaves."""
    seen = read_until(terminal, "> ")
    os.write(terminal, b"2\n")
    seen += read_until(terminal, "> ")
    os.write(terminal, b"\x04")
    return seen + read_until(terminal, "left before the end")


def read_until(terminal: int, text: str) -> str:
    seen = ""
    while text not in seen:
        assert select.select([terminal], [], [], 60)[0], seen
        seen += os.read(terminal, 4096).decode()
    return seen


def play(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["play", *arguments])
    return capsys.readouterr().out


def test_another_end_of_a_file_is_not_taken_for_leaving(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> str:
        raise EOFError("elsewhere")

    (tmp_path / "one").write_text("2\n")
    monkeypatch.setattr(PreTrainedTokenizerBase, "decode", fails)
    with pytest.raises(SystemExit) as ended:
        main(["play", "--config", config(folder, "end", {"environment": COUNT}), "--replies", str(tmp_path / "one")])
    assert ended.value.code == 1


def test_tokens_are_those_that_the_template_writes_and_say_who_wrote_them(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "replies.jsonl"
    script.write_text('"1"\n"zero\\n"\n')
    path = config(folder, "count", {"environment": COUNT})
    lines = play(capsys, "--config", path, "--replies", str(script), "--tokens").split("\n")
    written = [(line.split()[0], ids(below)) for line, below in pairwise(lines) if "'" in below]
    assert [who for who, _ in written] == ["prompt", "policy", "environment", "policy"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    turns = ["Play.", "count down from 1"]
    messages = [*({"role": "user", "content": each} for each in turns), {"role": "assistant", "content": "1"}]
    messages += [{"role": "user", "content": "next"}, {"role": "assistant", "content": "zero\n"}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")
    assert [token for _, of_part in written for token in of_part] == tokenizer(whole)["input_ids"]
    assert tokenizer.decode(written[1][1]) == "1<|im_end|>"
    assert lines[-3:-1] == ["rewards of the environment: 1, 0 (sum 1)", "ended: done, the environment ended it"]


def ids(line: str) -> list[int]:
    return [int(number) for number in re.findall(r"(?:^|  )(\d+) ['\"]", line.strip())]


def test_a_player_takes_all_seats_of_a_game(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "two").write_text("1\n2\n")
    path = config(folder, "stones", {"environment": "tests.environments.games.Stones"})
    lines = play(capsys, "--config", path, "--replies", str(tmp_path / "two")).split("\n")
    assert [line.split()[0] for line in lines if line.endswith(" tokens")] == ["prompt", "policy"] * 2
    assert [line.partition(",")[0] for line in lines if "by the policy" in line] == [
        "1 turn of `player`",
        "1 turn of `opponent`",
    ]
    rewards = [line.rpartition(": ")[2] for line in lines if line.startswith("rewards")]
    assert rewards == ["-0.75 (sum -0.75)", "1 (sum 1)"], "0.25 for a move, and the opponent took the last stone"


def test_a_reply_that_is_too_long_is_cut_as_a_model_s_is(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one").write_text("far too much\n")
    reward = {
        "class_path": "rlflow.rewards.CallableReward",
        "init_args": {"function": "tests.controller.answering.five"},
    }
    path = config(folder, "short", {"environment": WORD, "max_turn_length": 7}, reward=reward)
    lines = play(capsys, "--config", path, "--replies", str(tmp_path / "one")).split("\n")
    assert "    far too" in lines
    assert lines[-2] == "reward of the module: 5"
    assert lines[-3] == "ended: tokens, the policy's turn was cut at its longest length before it called a tool"


def test_a_message_of_the_environment_that_no_turn_reads_is_shown(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "two").write_text(f"{GUESS}\n{GUESS}")
    path = config(folder, "once", {"environment": WORD, "max_tool_calls": 1})
    output = play(capsys, "--config", path, "--replies", str(tmp_path / "two"))
    assert "  environment tool  which no turn reads\n    this call is refused: no more than 1 may be made" in output
    assert output.endswith("ended: turns, as many tools were called as `max_tool_calls` allows\n")


@pytest.mark.parametrize(
    ("environment", "options", "line"),
    [
        (None, (), "`module` is GRPO without an environment, so there is nothing to play; set `module"),
        ({"environment": WORD}, ("--row", "2"), "`--row` is 2, and .*rows.jsonl has the rows 0 to 1; give one"),
        ({"environment": WORD}, ("--environment", "x"), "GRPO has the environments environment; name one by"),
        ({"environment": WORD}, ("--replies", "{}/no"), "`--replies` is '.*/no', which cannot be read .*; name a file"),
        ({"environment": WORD}, ("--replies", "{}/few"), "`--replies` .*/few has 1 replies, .* to turn 2; give more"),
        ({"environment": WORD}, ("--replies", "{}/a.jsonl"), "`--replies` is .*a.jsonl', which cannot be read"),
        (
            {"environment": WORD},
            ("--replies", "{}/b.jsonl"),
            "`--replies` is .*b.jsonl', whose line 1 is not a text; write",
        ),
        ({"environment": "no.such.Game"}, (), "`environment` is 'no.such.Game', but there is no module no"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, Any] | None,
    options: Sequence[str],
    line: str,
) -> None:
    for name in ("few", "a.jsonl"):
        (tmp_path / name).write_text(GUESS)
    (tmp_path / "b.jsonl").write_text("3")
    reward = {"reward": {"class_path": "rlflow.rewards.ExactMatch"}} if environment is None else {}
    path = config(folder, "wrong", environment, **reward)
    with pytest.raises(SystemExit) as ended:
        main(["play", "--config", path, *(option.format(tmp_path) for option in options)])
    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert re.match(f"rlflow: error: {line}", said), said
