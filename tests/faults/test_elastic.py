"""torchrun starts ranks again after a death, and the run continues."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import own_folder
from tests.faults import preempted
from tests.faults.running import Running, left_over
from tests.ranks import RankPool

pytestmark = pytest.mark.row("elastic restart")

AGENT = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--monitor-interval=0.2")
TORCHRUN = (sys.executable, *AGENT)
OF_RANKS = {key.replace(".", "__"): value for key, value in own_folder.TWO_RANKS.items()}
RUNS, STEPS, EVERY, SAVES_EVERY = 10, 100, 20, 5


def dies(seed: int, every: int, at: int | None = None, until: int = 10**9) -> str:
    """The option by which ranks are killed."""
    given = {"seed": seed, "every": every, "at": at, "until": until}
    return f"--callbacks={json.dumps([{'class_path': 'my_callbacks.Dies', 'init_args': given}])}"


def finishes(folder: Path, steps: int, saves_every: int, killed: str, ranks: RankPool) -> tuple[int, float]:
    """A run whose ranks are killed comes to its end, with the weights of one whose ranks are not.

    Returns:
        Deaths, and the share of time that went into steps whose result stayed.
    """
    preempted.make(folder, **OF_RANKS)
    given = ["--config", "my.yaml", f"--trainer.max_steps={steps}"]
    ranks.run(own_folder.command, folder, "fit", *given, "--trainer.run_dir=whole", timeout_s=400)
    again = ["--trainer.run_dir=parts", "--trainer.ckpt_path=auto", f"--trainer.save_every_n_steps={saves_every}"]
    command = (*TORCHRUN, "--max-restarts=60", "-m", "rlflow.cli", "fit", *given, *again, killed)
    with left_over(folder) as left, Running(folder, command=command) as run:
        ended = run.ended(560)
    assert (ended.code, left) == (0, []), ended.errors[-3000:]
    whole, parts = preempted.left(folder / "whole"), preempted.left(folder / "parts")
    assert parts[0] == whole[0]  # weights, to the byte
    assert [line["step"] for line in parts[1]] == [line["step"] for line in whole[1]]
    assert parts[1] == whole[1]
    lines = (folder / "parts/metrics.jsonl").read_text().splitlines()
    useful = sum(json.loads(line)["time/step"] for line in lines)
    return len((folder / "deaths.txt").read_text().splitlines()), useful / ended.seconds


@pytest.mark.slow
def test_a_killed_rank_is_restarted_and_the_run_ends_with_the_same_weights(tmp_path: Path, ranks2: RankPool) -> None:
    deaths, _ = finishes(tmp_path, 6, 2, dies(0, 10**9, at=3, until=1), ranks2)
    assert deaths == 1
    assert not (tmp_path / "parts-1").exists()  # the folder that it went on in


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RUNS))
def test_a_run_of_100_steps_that_loses_a_rank_every_20_comes_to_its_end(
    seed: int,
    tmp_path: Path,
    ranks2: RankPool,
    counted: Callable[[str], None],
    measured: Callable[[str, float], None],
) -> None:
    deaths, useful = finishes(tmp_path, STEPS, SAVES_EVERY, dies(seed, EVERY), ranks2)
    assert deaths
    counted(f"runs of {STEPS} steps end with the weights of one that lost no rank")
    measured("{:.0f} deaths of each", deaths)
    measured("{:.0%} of the time useful", useful)
