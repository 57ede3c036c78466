"""The phases before the first step, and the packages that they do not import."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow.process import startup

ROOT = Path(__file__).parents[2]
IMPORTS = """
import sys
import rlflow.commands.fit
import rlflow.commands.graph
heavy = {"lightning.pytorch", "transformers", "deepspeed", "vllm", "datasets", "matplotlib", "wandb"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
rlflow.commands.fit.read_fit(["--config", "configs/quickstart_grpo.yaml"])
assert "rlflow.strategies.deepspeed" in sys.modules
assert "deepspeed" not in sys.modules, "it takes a device"
assert not [name for name in sys.modules if name.startswith("rlflow.simulate")]
import lightning
assert lightning.Trainer.__module__ == "lightning.pytorch.trainer.trainer"
from torchmetrics import Metric
assert Metric.__module__ == "torchmetrics.metric"
"""


@pytest.fixture(autouse=True)
def _nothing_is_counted_before() -> None:
    startup.end()  # a command of another test in this process may have ended before its first step


def test_phases_follow_one_another_and_add_up_to_the_whole() -> None:
    began = time.perf_counter()
    startup.begin()
    has_begun = time.perf_counter()
    startup.passed("imports")
    time.sleep(0.1)
    startup.passed("engine")
    time.sleep(0.1)
    ends = time.perf_counter()
    startup.passed("imports")
    has_ended = time.perf_counter()
    counted = startup.end()
    assert counted["engine"] >= 0.1
    assert counted["imports"] >= 0.1
    assert ends - has_begun <= sum(counted.values()) <= has_ended - began


def test_a_phase_of_no_length_is_not_shown() -> None:
    shown = startup.line({"models": 2.0, "engine": 0.04, "data": 0.16})
    assert shown == "before step 1: 2.2 s (models 2.0, data 0.2)"


def test_a_run_in_a_process_of_somebody_else_s_leaves_its_garbage_collection_alone() -> None:
    startup.begin()
    assert gc.isenabled()
    startup.passed("imports")
    assert [*startup.end()] == ["imports"]
    assert startup.end() == {}


@pytest.mark.parametrize("ready", [startup.collect_again, startup.end])
def test_a_process_of_a_run_collects_garbage_again_when_all_is_set_up(ready: Callable[[], object]) -> None:
    startup.begin(of_process=True)
    assert not gc.isenabled()
    ready()
    assert gc.isenabled()
    startup.end()


@pytest.mark.parametrize("of_process", [True, False])
def test_only_a_process_of_a_run_leaves_what_it_imported_out_of_searches_for_garbage(of_process: bool) -> None:
    before = gc.get_freeze_count()
    startup.begin(of_process)
    startup.set_aside()
    left_out = gc.get_freeze_count() - before
    gc.unfreeze()
    startup.end()
    assert (left_out > 0) == of_process


def test_a_config_is_read_without_what_its_run_may_not_use() -> None:
    ended = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
