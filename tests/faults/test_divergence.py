"""Two nodes whose files differ: refused before the first step, the first difference named.

Other seeds, steps, rows, plans and contents of data are shown by `tests/run/test_fit.py`, on ranks of one process pool.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlflow.models.tiny import write_tiny_model
from tests import own_folder
from tests.faults.running import Ended, Running
from tests.own_folder import REMOVED, rewarded_by, write

pytestmark = [pytest.mark.row("rank divergence"), pytest.mark.slow]
CHANGES = {
    "trainer.num_nodes": 2,
    "strategy": REMOVED,
    "module.class_path": "my_algorithm.ShortGRPO",
    "module.init_args.actor.model": "model",
} | rewarded_by("one")
HELPER = "def points():\n    return 1.0\n"
REWARD = "\n\nfrom helper import points\n\n\ndef one(response, row):\n    return points()\n"


def other_config(folder: Path) -> None:
    write(folder / "my.yaml", CHANGES | {"module.init_args.group_size": 4})


def other_data(folder: Path) -> None:
    rows = [{**row, "question": "2+2="} if number == 5 else row for number, row in enumerate(own_folder.ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def other_algorithm(folder: Path) -> None:
    path = folder / "my_algorithm.py"
    path.write_text(path.read_text().replace("+ brevity", "+ 2 * brevity"))


def other_reward(folder: Path) -> None:
    path = folder / "my_rewards.py"
    path.write_text(path.read_text().replace("return points()", "return points() + 1"))


def other_helper(folder: Path) -> None:
    (folder / "helper.py").write_text(HELPER.replace("1.0", "2.0"))


def other_model(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    write_tiny_model(folder / "model", seed=1)


def other_byte(folder: Path) -> None:
    path = folder / "model/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DIFFERENCES: dict[str, tuple[Callable[[Path], None], str]] = {
    "the config": (other_config, "config:     group_size: 4` there and `config:     group_size: 2"),
    "a row of the data": (other_data, "training data rows.jsonl: "),
    "the algorithm": (other_algorithm, "code of my_algorithm: "),
    "the reward": (other_reward, "code of my_rewards: "),
    "a module that the reward imports": (other_helper, "code of helper: "),
    "the model": (other_model, "file model.safetensors of `actor`: "),
    "a byte of the model": (other_byte, "file model.safetensors of `actor`: "),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "model")


def nodes(folders: list[Path]) -> list[Ended]:
    """The end of a rank in each folder; each folder stands for a machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    with ExitStack() as stack:
        runs = [
            stack.enter_context(
                Running(folder, "fit", "--config", "my.yaml", environment=place | {"NODE_RANK": str(number)})
            )
            for number, folder in enumerate(folders)
        ]
        return [run.ended() for run in runs]


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_rank_that_differs_is_refused_before_the_first_step(
    what: str, model: Path, tmp_path: Path, seen: Callable[[str], None]
) -> None:
    change, named = DIFFERENCES[what]
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        own_folder.make(folder)
        shutil.copytree(model, folder / "model")
        (folder / "my_rewards.py").write_text(own_folder.FILES["my_rewards.py"] + REWARD)
        (folder / "helper.py").write_text(HELPER)
        write(folder / "my.yaml", CHANGES)
    change(folders[1])
    for ended in nodes(folders):
        assert ended.code == 2, ended
        (line,) = ended.errors.splitlines()
        assert line.startswith(f"rlflow: error: rank 1 was started for another run than rank 0: `{named}"), line
    assert not any((folder / "runs/own/metrics.jsonl").exists() for folder in folders)
    seen(f"refused: {what}")
