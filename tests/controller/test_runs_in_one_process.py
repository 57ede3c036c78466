"""One run after another in the same processes costs no more process groups than the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow import Trainer, UserError
from tests.controller.runs import ZERO2, Fit, fit, grpo, sums
from tests.ranks import RankPool


def groups_after_each(policy: Path, folder: Path, runs: int) -> list[int]:
    """Number of loops of gloo in this process after each run: one for each process group."""
    counts = []
    settings = {"max_steps": 1, "placement": {"rollout": 0}}
    for run in range(runs):
        fit(Fit(grpo(policy), sums(8, 4), folder / str(run), ZERO2, settings=settings))
        threads = [(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]
        counts.append(threads.count("gloo_tcp_loop"))
    return counts


def test_runs_share_their_process_groups(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    for first, second, third in ranks2.run(groups_after_each, policy, tmp_path, 3):
        assert first > 0
        assert second == third == first


def refused(policy: Path, folder: Path) -> str:
    with pytest.raises(UserError) as error:
        Trainer(folder, max_steps=1, devices=1, accelerator="cpu").fit(grpo(policy), sums(8, 2))
    return str(error.value)


def test_a_rank_of_a_run_is_refused_a_run_of_its_own(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    for said in ranks2.run(refused, policy, tmp_path):
        assert said.startswith("`trainer.devices` gives 1 rank, and an earlier run in this process had 2; all")
