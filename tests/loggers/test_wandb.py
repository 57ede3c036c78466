"""Weights & Biases: the real library in offline mode, by reading back the file that it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow.errors import UserError
from rlflow.loggers import WandbLogger

BLOCK = (
    32768  # the file is a LevelDB log: blocks of records, a record's header being crc (4 bytes), length (2), type (1)
)
HEADER = 7
FULL, LAST = 1, 4


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of two steps left: config, metrics by step, the table of samples."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    folder = tmp_path_factory.mktemp("runs") / "tiny"
    folder.mkdir()
    logger = WandbLogger(project="sums", mode="offline", samples=1)
    given, sys.argv = sys.argv, [*sys.argv, "--logger.init_args.api_key", "opensesame"]
    logger.start(folder)
    sys.argv = given
    logger.log_config({"seed": 3, "module": {"class_path": "rlflow.algorithms.GRPO"}})
    logger.log_metrics({"reward/mean": 0.5}, step=1)
    said = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2", "reward": 0.5, "ended": "over"}]
    logger.log_samples(
        [
            {"prompt": "1+1=", "response": "2", "reward": 1.0, "messages": said},
            {"prompt": "p", "response": "", "reward": 0, "messages": []},
        ],
        1,
    )
    logger.log_metrics({"reward/mean": 0.75, "actor/kl": 0.01}, step=2)
    logger.finish()
    wandb.teardown()  # as at the end of a process: its service writes the file after `finish` returned

    config: dict[str, Any] = {}
    history: dict[int, dict[str, Any]] = {}
    run: dict[str, str] = {}
    (file,) = folder.rglob("run-*.wandb")
    for payload in records(file.read_bytes()):
        record = Record.FromString(payload)
        if record.HasField("run"):
            run = {"project": record.run.project, "name": record.run.display_name}
        for update in [*record.run.config.update, *record.config.update]:
            config[update.key or ".".join(update.nested_key)] = json.loads(update.value_json)
        if record.HasField("history"):
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            history.setdefault(items["trainer/global_step"], {}).update(items)  # Lightning's name for a step
    (table,) = folder.rglob("*.table.json")
    told = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    return {
        "opensesame": b"opensesame" in told,
        "run": run,
        "config": config,
        "history": history,
        "table": json.loads(table.read_text()),
    }


def records(data: bytes) -> Iterator[bytes]:
    """The payloads of a `.wandb` file, whose first record stands after a header of its own of the same size."""
    position, payload = HEADER, b""
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        payload += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (FULL, LAST):
            yield payload
            payload = b""


def test_metrics_stand_at_their_steps(recorded: dict[str, Any]) -> None:
    history = recorded["history"]
    assert history[1]["reward/mean"] == 0.5
    assert (history[2]["reward/mean"], history[2]["actor/kl"]) == (0.75, 0.01)


def test_the_config_is_recorded(recorded: dict[str, Any]) -> None:
    assert recorded["config"]["seed"] == 3
    assert recorded["config"]["module"] == {"class_path": "rlflow.algorithms.GRPO"}


def test_the_command_line_which_may_hold_a_secret_is_not_recorded(recorded: dict[str, Any]) -> None:
    assert not recorded["opensesame"]


def test_samples_are_a_table_of_at_most_so_many_rows(recorded: dict[str, Any]) -> None:
    assert recorded["table"]["columns"] == ["prompt", "response", "reward", "messages"]
    transcript = "user: 1+1=\n\nassistant, reward 0.5: 2\n\n(over)"
    assert recorded["table"]["data"] == [["1+1=", "2", 1.0, transcript]]


def test_the_run_is_named_after_its_folder(recorded: dict[str, Any]) -> None:
    assert recorded["run"] == {"project": "sums", "name": "tiny"}


def test_online_without_a_login_is_the_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(UserError, match=r"wandb login.*mode: offline"):
        WandbLogger(mode="online").start(tmp_path)


def test_a_logger_that_is_only_made_does_not_import_wandb() -> None:
    code = "import sys; from rlflow.loggers import WandbLogger; WandbLogger(); sys.exit('wandb' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
