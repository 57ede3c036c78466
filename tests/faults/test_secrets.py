"""Secrets of the config, the command line, the environment and errors are in no file and no line of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import own_folder
from tests.faults.running import COMMAND, Ended, Running
from tests.own_folder import TWO_RANKS, write

pytestmark = [pytest.mark.row("safety"), pytest.mark.faults]

# Made up, 24 of them: what stands under a key that names a secret has no shape of its own.
KEYS = {
    "api_key": "opensesame-01",
    "Authorization": "opensesame-02",
    "client_secret": "opensesame-03",
    "aws_secret_access_key": "opensesame-04",
    "passwd": "opensesame-05",
    "slack_webhook": "opensesame-06",
    "PLANTED_TOKEN": "opensesame-07",
    "hf_token": "opensesame-08",
    "password": "opensesame-09",
    "login": "me:opensesame-10",
    "signature": "opensesame-11",
    "private_key": "opensesame-12",
    "db_pass": "opensesame-13",
    "openai_key": "opensesame-14",
    "tokens": "opensesame-15",
    "passwords": "opensesame-16",
}
SHAPES = {
    "Hugging Face": "hf_" + "aBcDeFgHiJkLmNoPqRsT",
    "OpenAI": "sk-proj-" + "abcd1234efgh5678",
    "GitHub": "ghp_" + "abcdefghijklmnop1234",
    "AWS": "AKIA" + "IOSFODNN7EXAMPLE",
    "Google": "AIza" + "SyA1234567890abcdefghijklmnopqrstuv",
    "Slack": "xoxb-" + "123456789012-abcdefghijkl",
    "GitLab": "glpat-" + "abcdefghij0123456789",
    "JSON web token": "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0In0" + ".abc_DEF-123",
}
PLANTED = [*KEYS.values(), *SHAPES.values()]
REWARD = "module.init_args.reward"
IN_THE_CONFIG = {
    "class_path": "tests.faults.secret_rewards.Served",
    "init_args": {
        "url": f"https://{KEYS['login']}@example.org/score?signature={KEYS['signature']}",
        "api_key": KEYS["api_key"],
        "headers": {"Authorization": KEYS["Authorization"], "x-slack_webhook": KEYS["slack_webhook"]},
        "stores": [
            {name: KEYS[name] for name in ("client_secret", "aws_secret_access_key", "passwd", "private_key")},
            {name: KEYS[name] for name in ("db_pass", "openai_key")},
            {"tokens": [KEYS["tokens"]], "passwords": {"a": KEYS["passwords"]}},
        ],
        "note": f"the old one was {SHAPES['OpenAI']}",
        "names": [SHAPES[name] for name in ("AWS", "Google", "Slack", "GitLab", "JSON web token")],
    },
}
IN_THE_ENVIRONMENT = {"PLANTED_TOKEN": KEYS["PLANTED_TOKEN"], "PLANTED_SHAPE": SHAPES["GitHub"]}
ON_THE_COMMAND_LINE = [
    f"--{REWARD}.init_args.hf_token={KEYS['hf_token']}",
    f"--{REWARD}.init_args.password",
    KEYS["password"],
    f"--{REWARD}.init_args.names+={SHAPES['Hugging Face']}",
]
LOGGERS = [
    {"class_path": "rlflow.loggers.WandbLogger", "init_args": {"mode": "offline"}},
    {"class_path": "rlflow.loggers.TensorBoardLogger"},
]
PROJECT = str(Path(__file__).parents[2])


def run(folder: Path, *more: str) -> tuple[Ended, list[list[str]]]:
    """A run to its end, and the command lines of what it started."""
    own_folder.make(folder)
    kept = {"trainer.keep_inputs": [1], "trainer.save_every_n_steps": 1, "trainer.max_steps": 2}
    write(folder / "my.yaml", TWO_RANKS | kept | {REWARD: IN_THE_CONFIG, "logger": LOGGERS})
    environment = IN_THE_ENVIRONMENT | {"PYTHONPATH": f"{folder}:{PROJECT}"}
    lines: list[list[str]] = []
    arguments = ["fit", "--config", "my.yaml", *ON_THE_COMMAND_LINE, *more]
    with Running(folder, *arguments, environment=environment) as running:
        given = [*COMMAND, *arguments]
        while running.process.poll() is None:
            for process in running.processes():
                with contextlib.suppress(psutil.Error):
                    line = process.cmdline()
                    if line not in lines and line != given:  # of what the user started, and its fork
                        lines.append(line)
            time.sleep(0.05)
        return running.ended(), lines


def found_in(folder: Path, ended: Ended, lines: list[list[str]], *parts: str) -> list[tuple[str, str]]:
    """Secrets, and where they stand, the test's own inputs aside; files with these `parts` of a name must be there."""
    places: dict[str, bytes] = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in (folder / "runs").rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    for part in parts:
        assert any(part in name for name in places), (part, list(places))
    assert any(b"api_key: '***'" in content for content in places.values())
    places |= {"the terminal": (ended.output + ended.errors).encode(), "command lines": repr(lines).encode()}
    bare = {secret: secret.rpartition(":")[2].encode() for secret in PLANTED}
    return [(secret, name) for secret in PLANTED for name, content in places.items() if bare[secret] in content]


def test_24_planted_secrets_are_found_in_no_file_line_or_command_of_a_run(
    tmp_path: Path, seen: Callable[[str], None]
) -> None:
    ended, lines = run(tmp_path)
    assert ended.code == 0, ended
    assert "samples were scored 0" in (tmp_path / "runs/own/logs/rank0.log").read_text()
    assert any(line[-1:] == ["fit"] for line in lines)  # rank 1
    kept = ("config.yaml", ".wandb", "tfevents", "state.json", "/inputs/", "metrics", "samples", "trace", "summary")
    assert found_in(tmp_path, ended, lines, *kept) == []
    seen(f"{len(PLANTED)} planted, 0 found")


def test_nor_in_those_of_a_run_that_ends_with_an_error_that_has_them(tmp_path: Path) -> None:
    ended, lines = run(tmp_path, f"--{REWARD}.init_args.at_end", "true", "--trainer.keep_inputs", "[]")
    assert ended.code == 2, ended
    assert "answered 401" in ended.last
    assert "\x1b" not in ended.errors
    assert not any(line.startswith("rlflow: error: forged") for line in ended.errors.splitlines())
    assert len(ended.errors.splitlines()) == 1
    assert found_in(tmp_path, ended, lines, ".wandb", "tfevents", "rewards.failed") == []
