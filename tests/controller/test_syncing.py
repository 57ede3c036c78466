"""Weight sync, seen from one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.rollout.transformers import TransformersEngine
from tests.controller.runs import Fit, fit, grpo, sums


class Wakes(TransformersEngine):
    """Writes down when it takes its memory back."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def wake_up(self) -> None:
        self.seen.append("wake up")


def test_training_frees_its_cache_before_the_engine_takes_memory(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("empty cache"))
    settings: dict[str, Any] = {"max_steps": 2}
    fit(Fit(grpo(policy), sums(8, 4), tmp_path / "run", engine=Wakes(seen), settings=settings))
    assert seen == ["empty cache", "wake up"] * 2
