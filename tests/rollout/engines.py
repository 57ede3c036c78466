"""Engines for a process of its own: one that does wrong things, and one that says what it was given."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence

from torch import Tensor

from rlflow.rollout import Completion, RankInfo, RolloutEngine, Sampling, SyncReport


class Broken(RolloutEngine):
    """Complains when it is set up, fails when it shall load, exits when it shall generate, and sleeps for long."""

    def setup(self, model_path: str, rank_info: RankInfo) -> None:
        print("an engine's errors", file=sys.stderr)

    def update_weights(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        return SyncReport(version, 0, 0, next(iter(buckets))[0][1].numel() / 0)

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling, version: int
    ) -> list[Completion]:
        print("the last words of an engine", file=sys.stderr)
        os._exit(3)

    def sleep(self, keep_weights: bool = False) -> None:
        print("sleeps")
        time.sleep(600)

    def close(self) -> None:
        """Nothing is open."""


class SaysItsRank(Broken):
    """Fails when it is set up, with its number among the ranks that share it."""

    def setup(self, model_path: str, rank_info: RankInfo) -> None:
        raise RuntimeError(f"rank {rank_info.rank} of {rank_info.world_size}")
