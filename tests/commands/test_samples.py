"""`rlflow samples`: the stored samples of a run, in a terminal, in a pipe, and filtered."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlflow.cli import main
from rlflow.loggers.jsonl import JSONLLogger

PLAIN = {"row": 7, "sample": 1, "prompt": "1+1=", "response": "2\x1b[31m", "reward": 1.0, "parts": {"right": 0.5}}
PLAIN |= {"turns": 1, "ended": "done", "messages": []}
READ = "<|im_start|>system\nTools: look()<|im_end|>\n<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant"
SAID = [
    {"role": "user", "content": "guess"},
    {"role": "assistant", "content": "house or garden", "reward": 0.25},
    {"role": "tool", "name": "look", "content": "wrong", "ended": "the environment failed: it broke"},
]
TALK = {"row": 3, "sample": 0, "prompt": "", "response": "", "reward": 0.25, "parts": {}}
TALK |= {"turns": 1, "ended": "failed", "messages": SAID}
TOOLED = TALK | {"read": READ}
PRINTED = {
    "plain": [
        "step {step}  row 7  sample 1  reward 1 (right 0.5)  ended: done",
        "  prompt",
        "    1+1=",
        "  response",
        "    2\\x1b[31m",
        "",
    ],
    "talk": [
        "step {step}  row 3  sample 0  reward 0.25  1 turn  ended: failed, the environment failed: it broke",
        "  user",
        "    guess",
        "  assistant  reward 0.25",
        "    house or garden",
        "  tool look",
        "    wrong",
        "",
    ],
}
PRINTED["tooled"] = [
    PRINTED["talk"][0],
    "  read before the first turn",
    *[f"    {line}" for line in READ.split("\n")],
    *PRINTED["talk"][3:],
]


def printed(name: str, step: int) -> list[str]:
    return [line.format(step=step) for line in PRINTED[name]]


def write(folder: Path, steps: dict[int, list[dict[str, Any]]]) -> None:
    logger = JSONLLogger()
    logger.start(folder)
    for step, samples in steps.items():
        logger.log_samples(samples, step)
    logger.finalize("success")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, {2: [PLAIN, TALK], 4: [TALK], 5: [PLAIN]})
    return tmp_path


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("", [("plain", 2), ("talk", 2), ("talk", 4), ("plain", 5)]),
        ("--step 2", [("plain", 2), ("talk", 2)]),
        ("--last", [("plain", 5)]),
        ("--ended failed", [("talk", 2), ("talk", 4)]),
        ("--reward_below 1", [("talk", 2), ("talk", 4)]),
        ("--row 7 --step 2", [("plain", 2)]),
    ],
)
def test_the_samples_that_are_asked_for_are_printed(
    folder: Path, capsys: pytest.CaptureFixture[str], options: str, shown: list[tuple[str, int]]
) -> None:
    main(["samples", str(folder), *options.split()])
    assert capsys.readouterr().out.split("\n") == [*(line for each in shown for line in printed(*each)), ""]


def test_a_conversation_begins_with_what_the_policy_read_tools_among_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {1: [TOOLED]})
    main(["samples", str(tmp_path)])
    assert capsys.readouterr().out.split("\n") == [*printed("tooled", 1), ""]


def test_a_sample_of_a_tree_says_which_one_it_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leaf = PLAIN | {"path": "2.1", "continues": {"sample": "2.0", "tokens": 3, "text": "2"}}
    write(tmp_path, {1: [leaf, PLAIN | {"sample": 5, "episode": "4"}]})
    main(["samples", str(tmp_path)])
    first = [line for line in capsys.readouterr().out.split("\n") if line.startswith("step")]
    assert first == [
        "step 1  row 7  sample 2.1  begins with 3 tokens of sample 2.0  reward 1 (right 0.5)  ended: done",
        "step 1  row 7  sample 5  of the episode of sample 4  reward 1 (right 0.5)  ended: done",
    ]


def test_if_no_sample_matches_a_line_says_how_many_there_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["samples", str(folder), "--step", "2", "--ended", "turns"])
    assert capsys.readouterr().out == "none of 2 samples is so\n"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--step 3", "`--step` is 3, and `{}` has no samples of it; the nearest steps are [2, 4, 5]"),
        ("--step 2 --last", "`--step` is 2 and `--last` is given; give one of them"),
        ("--ended x", "`--ended` is 'x'; give one of 'done', 'turns', 'tokens', 'failed' or null"),
        ("--reward_below x", "`--reward_below` is 'x'; give a number or null"),
    ],
)
def test_options_that_cannot_work_are_refused_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], options: str, line: str
) -> None:
    assert refusal(capsys, str(folder), *options.split()) == f"rlflow: error: {line.format(folder)}\n"


def test_a_folder_without_samples_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no samples.jsonl" in refusal(capsys, str(tmp_path))
    assert "is not a folder" in refusal(capsys, str(tmp_path / "nowhere"))
    write(tmp_path, {})
    assert "has an empty samples.jsonl" in refusal(capsys, str(tmp_path))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["samples", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_terminal_has_colours_and_lines_of_its_width(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", "16")
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(["samples", str(folder), "--step", "4"])
    coloured = capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    main(["samples", str(folder), "--step", "4"])
    plain = capsys.readouterr().out
    assert "\x1b[32m" in coloured, "the policy's green"
    assert "\x1b[3" not in plain
    assert "\n    house or\n    garden\n" in re.sub(r"\x1b\[[\d;]*m", "", plain)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == re.sub(r"\x1b\[[\d;]*m", "", plain)


def test_a_pipe_closed_by_its_reader_is_not_an_error(tmp_path: Path) -> None:
    write(tmp_path, {1: [TALK | {"messages": [{"role": "user", "content": "x" * 1000}]}] * 500})
    command = [sys.executable, "-m", "rlflow.cli", "samples", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("step 1")
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 0)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"\0\0\0\0\n", "is damaged: line 5 is not what a run writes there"),
        (b'{"step": 6}\n', "is damaged: of step 6 it has a sample that no run writes"),
        (b'{"step": 6, "parts": 3, "reward": "a"}\n', "is damaged: of step 6 it has a sample that no run writes"),
    ],
)
def test_a_damaged_sample_is_one_line(
    folder: Path, line: bytes, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (folder / "samples.jsonl").open("ab") as file:
        file.write(line)
    with pytest.raises(SystemExit) as ended:
        main(["samples", str(folder)])
    assert ended.value.code == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert f"{folder}/samples.jsonl {found}" in told
