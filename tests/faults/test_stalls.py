"""A rank that is killed or stands still ends the run within the timeout + 30 s, and the last line names it."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import own_folder
from tests.faults.running import Ended, Running, left_over
from tests.own_folder import TWO_RANKS, write

pytestmark = [pytest.mark.row("rank death or stall"), pytest.mark.slow]
HERE = socket.gethostname()
STALLS = Path(__file__).with_name("stalls.py")
TIMEOUT_S = 60.0  # ranks start side by side with others, and one may be a minute late where tests share the cores
POINTS = ("start", "load", "rollout", "train", "sync", "save")
CHANGES = TWO_RANKS | {
    "strategy": {"class_path": "rlflow.strategies.DeepSpeedStrategy", "init_args": {"timeout_s": TIMEOUT_S}},
    "rollout": {"class_path": "stalls.StallingEngine"},
    "callbacks": [{"class_path": "stalls.Stalls"}],
    "trainer.save_every_n_steps": 1,
}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rlflow.cli")
SILENT = "it is stopped, or code in C holds its interpreter"


def ended(folder: Path, how: str, rank: int, point: str, *command: str) -> tuple[Ended, float]:
    """End of the run, and the seconds from when the rank stood still until then."""
    own_folder.make(folder)
    shutil.copy(STALLS, folder)
    write(folder / "my.yaml", CHANGES)
    given = {"environment": {"STALL": f"{how} {rank} {point}"}} | ({"command": command} if command else {})
    with left_over(folder) as left, Running(folder, "fit", "--config", "my.yaml", **given) as run:
        end = run.ended(within=300)
        at = time.time()
    assert end.code != 0
    assert left == []
    assert (folder / "stalled.txt").exists(), end
    after = at - float((folder / "stalled.txt").read_text())
    assert after < TIMEOUT_S + 30, end
    return end, after


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named(
    rank: int, point: str, tmp_path: Path, measured: Callable[[str, float], None]
) -> None:
    end, after = ended(tmp_path, "kill", rank, point)
    assert f"rank {rank} on {HERE} was killed by SIGKILL" in end.last, end
    measured(f"killed: ended after {{:.0f}} s of {TIMEOUT_S + 30:.0f}", after)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_named(
    rank: int, point: str, tmp_path: Path, measured: Callable[[str, float], None]
) -> None:
    end, after = ended(tmp_path, "stop", rank, point)
    assert f"rank {rank} on {HERE} has not answered for" in end.last, end
    assert SILENT in end.last
    assert "Traceback" not in end.errors
    measured(f"stopped: ended after {{:.0f}} s of {TIMEOUT_S + 30:.0f}", after)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_spins_in_c_is_named(rank: int, tmp_path: Path, measured: Callable[[str, float], None]) -> None:
    end, after = ended(tmp_path, "spin", rank, "rollout")
    assert f"rank {rank} on {HERE} has not answered for" in end.last, end
    assert "step 1, run rollout" in end.last
    measured("spinning in C: ended after {:.0f} s", after)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_sleeps_while_others_wait_is_named(
    rank: int, tmp_path: Path, measured: Callable[[str, float], None]
) -> None:
    end, after = ended(tmp_path, "sleep", rank, "rollout")
    limit = f"`timeout_s` ({TIMEOUT_S:g} s)"
    late = f"rank {rank} on {HERE} did not join the other ranks within {limit}: it is at step 1, run rollout"
    assert late in end.last, end
    measured("asleep: ended after {:.0f} s", after)


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("rank", [0, 1])
def test_under_torchrun_a_missing_rank_is_named_by_its_own_supervisor(
    rank: int, how: str, tmp_path: Path, measured: Callable[[str, float], None]
) -> None:
    end, after = ended(tmp_path, how, rank, "rollout", *TORCHRUN)
    what = "has not answered for" if how == "stop" else "was killed by SIGKILL"
    lines = [line for line in end.errors.splitlines() if line.startswith("rlflow: error:")]
    assert lines[-1].startswith(f"rlflow: error: rank {rank} on {HERE} {what}"), end
    measured(f"torchrun, {how}: ended after {{:.0f}} s", after)
