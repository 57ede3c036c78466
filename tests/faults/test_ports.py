"""The ports of a run on one machine listen on the loopback alone."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from rlflow.rollout.engine_subprocess import free_address
from tests import own_folder
from tests.faults.running import Running
from tests.own_folder import TWO_RANKS, rewarded_by, write

pytestmark = pytest.mark.row("safety")
WAITS = "\n\ndef waits(response, row):\n    open('scoring.txt', 'w').close()\n    time.sleep(2.0)\n    return 1.0\n"


def listening(run: Running) -> set[str]:
    """The addresses on which processes of a run listen."""
    found = set()
    for process in run.processes():
        with contextlib.suppress(psutil.Error):
            kinds = process.net_connections("inet")
            found |= {each.laddr.ip for each in kinds if each.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.slow
def test_the_store_and_the_ranks_listen_on_the_loopback_alone(tmp_path: Path, seen: Callable[[str], None]) -> None:
    own_folder.make(tmp_path)
    (tmp_path / "my_rewards.py").write_text(own_folder.FILES["my_rewards.py"] + WAITS)
    write(tmp_path / "my.yaml", TWO_RANKS | rewarded_by("waits"))
    with Running(tmp_path, "fit", "--config", "my.yaml") as run:
        run.ranks(2)
        while not (tmp_path / "scoring.txt").exists():
            assert run.process.poll() is None, run.errors
            time.sleep(0.1)
        found = listening(run)
    assert found, "a run of two ranks has a store"
    assert {address.removeprefix("::ffff:") for address in found} <= {"127.0.0.1", "::1"}
    seen("ports of two ranks: loopback alone")


JOINS = """
import psutil, sys
from datetime import timedelta
from rlflow.strategies.processes import join_group

join_group("gloo", 0, 1, "127.0.0.1", int(sys.argv[1]), timedelta(seconds=60))
print(*{each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN})
"""


def test_a_rank_that_serves_the_store_listens_on_the_loopback_alone(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Running(tmp_path, JOINS, str(port), command=(sys.executable, "-c")) as run:
        ended = run.ended()
    assert ended.code == 0, ended
    found = ended.output.split()
    assert found, "it serves the store"
    assert {address.removeprefix("::ffff:") for address in found} <= {"127.0.0.1", "::1"}


def test_the_store_where_an_engine_s_processes_meet_listens_on_one_interface() -> None:
    host, port = free_address().rsplit(":", 1)
    kinds = psutil.Process().net_connections("inet")
    found = {each.laddr.ip for each in kinds if each.status == psutil.CONN_LISTEN and each.laddr.port == int(port)}
    assert {address.removeprefix("::ffff:") for address in found} == {host}
    assert dist.TCPStore(host, int(port), is_master=False).num_keys() >= 0  # it answers
