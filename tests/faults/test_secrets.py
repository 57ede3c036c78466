"""Secrets of the config, the command line and the environment are in no file and no line of a run."""

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

pytestmark = [pytest.mark.row("safety"), pytest.mark.slow]

# Made up, each under a key that names a secret; and one in the environment.
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
    "private_key": "opensesame-10",
    "db_pass": "opensesame-11",
    "openai_api_key": "opensesame-12",
    "tokens": "opensesame-13",
    "passwords": "opensesame-14",
    "login_password": "opensesame-15",
    "secret": "opensesame-16",
}
REWARD = "module.init_args.reward"
IN_THE_CONFIG = {
    "class_path": "tests.faults.secret_rewards.Served",
    "init_args": {
        "api_key": KEYS["api_key"],
        "headers": {"Authorization": KEYS["Authorization"], "x-slack_webhook": KEYS["slack_webhook"]},
        "stores": [
            {name: KEYS[name] for name in ("client_secret", "aws_secret_access_key", "passwd", "private_key")},
            {name: KEYS[name] for name in ("db_pass", "openai_api_key")},
            {"tokens": [KEYS["tokens"]], "passwords": {"a": KEYS["passwords"]}},
        ],
        "command": ["serve", "--login_password", KEYS["login_password"]],
    },
}
ON_THE_COMMAND_LINE = [
    f"--{REWARD}.init_args.hf_token={KEYS['hf_token']}",
    f"--{REWARD}.init_args.password",
    KEYS["password"],
    f"--{REWARD}.init_args.stores+={{secret: {KEYS['secret']}}}",
]
LOGGERS = [
    {"class_path": "rlflow.loggers.WandbLogger", "init_args": {"mode": "offline"}},
    {"class_path": "rlflow.loggers.TensorBoardLogger"},
]
PROJECT = str(Path(__file__).parents[2])


def run(folder: Path, *more: str) -> tuple[Ended, list[list[str]]]:
    """A run to its end, and the command lines of what it started."""
    own_folder.make(folder)
    kept = {"trainer.dump_steps": [1], "trainer.save_every_n_steps": 1, "trainer.max_steps": 2}
    write(folder / "my.yaml", TWO_RANKS | kept | {REWARD: IN_THE_CONFIG, "logger": LOGGERS})
    environment = {"PLANTED_TOKEN": KEYS["PLANTED_TOKEN"], "PYTHONPATH": f"{folder}:{PROJECT}"}
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
    return [
        (key, name) for key, secret in KEYS.items() for name, content in places.items() if secret.encode() in content
    ]


def test_planted_secrets_are_found_in_no_file_line_or_command_of_a_run(
    tmp_path: Path, seen: Callable[[str], None]
) -> None:
    ended, lines = run(tmp_path)
    assert ended.code == 0, ended
    assert "samples were scored 0" in (tmp_path / "runs/own/logs/rank0.log").read_text()
    assert any(line[-1:] == ["fit"] for line in lines)  # rank 1
    kept = ("config.yaml", ".wandb", "tfevents", "state.json", "/inputs/", "metrics", "samples", "trace", "summary")
    assert found_in(tmp_path, ended, lines, *kept) == []
    seen(f"{len(KEYS)} planted, 0 found")


def test_secrets_are_in_no_file_of_a_run_that_fails_and_its_error_forges_no_line(tmp_path: Path) -> None:
    ended, lines = run(tmp_path, f"--{REWARD}.init_args.at_end", "true", "--trainer.dump_steps", "[]")
    assert ended.code == 2, ended
    assert "answered 401" in ended.last
    assert "\x1b" not in ended.errors
    assert not any(line.startswith("rlflow: error: forged") for line in ended.errors.splitlines())
    assert len(ended.errors.splitlines()) == 1
    assert found_in(tmp_path, ended, lines, ".wandb", "tfevents", "rewards.failed") == []
