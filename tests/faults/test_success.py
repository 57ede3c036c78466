"""Exit code 0 means that the run came to its end: ways to end before it, each tried on a whole run."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import own_folder
from tests.faults.running import Ended, Running, left_over
from tests.own_folder import TWO_RANKS, write

pytestmark = [pytest.mark.row("success means success"), pytest.mark.slow]
HERE = socket.gethostname()
WAYS = Path(__file__).with_name("early_ends.py")
REWARD, REWARDS = "module.init_args.reward", "step 1, run rewards"
BEFORE = "before the run came to its end"


def rewarded(function: str, **more: Any) -> dict[str, Any]:
    given = {"function": f"early_ends.{function}", **more}
    return {REWARD: {"class_path": "rlflow.rewards.CallableReward", "init_args": given}}


def called_back(name: str) -> dict[str, Any]:
    return {"callbacks": [{"class_path": f"early_ends.{name}"}]}


PLAYED = {"class_path": "rlflow.Environment", "init_args": {"environment": "early_ends.LeavesAtReset"}}
LEFT = f"rank 0 on {HERE} exited with code 0 ({REWARDS}"
CALLED = "rank 0 called `sys.exit(0)`"
# By what ends early: changes of the config, and what the last line says.
ONE_RANK: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a reward calls sys.exit": (rewarded("calls_exit"), (CALLED, REWARDS, BEFORE)),
    "a reward leaves": (rewarded("leaves"), (LEFT, BEFORE)),
    "a reward's thread leaves": (rewarded("leaves_in_a_thread"), (LEFT, BEFORE)),
    "a reward leaves after its child": (rewarded("leaves_after_a_child_has_ended"), (LEFT, BEFORE)),
    "a reward's worker leaves": (rewarded("leaves", timeout_s=60.0), ("early_ends.leaves", "code 0")),
    "an atexit leaves after an error": (rewarded("raises_before_an_atexit_that_leaves"), ("KeyError",)),
    "a node leaves": ({"module.class_path": "early_ends.LeavesInANode"}, (LEFT, BEFORE)),
    "a node calls sys.exit": ({"module.class_path": "early_ends.CallsExitInANode"}, (CALLED, REWARDS, BEFORE)),
    "a callback leaves": (called_back("LeavesAtAStep"), (f"rank 0 on {HERE} exited with code 0 (step 1)", BEFORE)),
    "a callback calls sys.exit": (called_back("CallsExitAtTheEnd"), (CALLED, BEFORE)),
    "an environment leaves": (
        {"module.init_args.environment": PLAYED, REWARD: None},
        (f"rank 0 on {HERE} exited with code 0 (step 1, run rollout", BEFORE),
    ),
    "an environment calls sys.exit": (
        {"module.init_args.environment": {**PLAYED, "init_args": {"environment": "early_ends.CallsExitAtReset"}}}
        | {REWARD: None},
        ("an environment called `sys.exit(0)`", "raise an error instead"),
    ),
}


def folder_of(path: Path, changes: dict[str, Any]) -> Path:
    own_folder.make(path)
    shutil.copy(WAYS, path)
    write(path / "my.yaml", changes)
    return path


def require_named(ended: Ended, parts: tuple[str, ...]) -> None:
    assert ended.code not in (0, -9), ended
    assert all(part in ended.last for part in parts), ended
    assert "Traceback" not in ended.errors or "KeyError" in parts, ended


@pytest.mark.parametrize("way", ONE_RANK)
def test_a_run_of_one_rank_that_ends_early_has_failed(way: str, tmp_path: Path, seen: Callable[[str], None]) -> None:
    changes, parts = ONE_RANK[way]
    folder = folder_of(tmp_path, changes | {"trainer.max_steps": 1})
    with left_over(tmp_path) as left, Running(folder, "fit", "--config", "my.yaml") as run:
        ended = run.ended()
    require_named(ended, parts)
    assert left == []
    assert not (folder / "runs/own/summary.json").exists()
    seen(way)


@pytest.mark.parametrize("end", ["in its reward", "at import on rank 1"])
def test_a_rank_that_is_gone_with_code_0_has_failed(end: str, tmp_path: Path, seen: Callable[[str], None]) -> None:
    folder = folder_of(tmp_path, TWO_RANKS | rewarded("leaves_on_rank_1"))
    when = {"EARLY_END": end}
    with left_over(tmp_path) as left, Running(folder, "fit", "--config", "my.yaml", environment=when) as run:
        ended = run.ended()
    doing = REWARDS if end == "in its reward" else "before its first step"
    require_named(ended, (f"rank 1 on {HERE} exited with code 0 ({doing}", BEFORE))
    assert left == []
    seen(f"rank 1 gone {end}")


def test_a_rank_of_torchrun_that_is_gone_with_code_0_has_failed(tmp_path: Path, seen: Callable[[str], None]) -> None:
    """Each node has its own supervisor, and its rank there is the one that is named."""
    folder = folder_of(tmp_path, TWO_RANKS | rewarded("leaves_on_rank_1"))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    arguments = ("-m", "rlflow.cli", "fit", "--config", "my.yaml")
    with left_over(tmp_path) as left, Running(folder, *arguments, command=torchrun) as run:
        ended = run.ended()
    assert ended.code != 0
    assert f"rlflow: error: rank 1 on {HERE} exited with code 0 ({REWARDS}" in ended.errors, ended
    assert left == []
    seen("a rank of torchrun gone in its reward")
