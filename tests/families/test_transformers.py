"""Every family in the reference engine, mixtures of experts included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlflow.models.causal_lm import ScoringModel
from rlflow.rollout import TransformersEngine
from tests.families.gap import follow_three_syncs
from tests.families.models import FAMILIES, STATEFUL
from tests.rollout.trained import setup
from tests.slow import slow_but


@pytest.mark.parametrize("name", slow_but([name for name in FAMILIES if name not in STATEFUL], FAMILIES))
def test_logprobs_are_training_s_after_each_sync(name: str, family: Callable[[str], Path]) -> None:
    folder = family(name)
    follow_three_syncs(
        setup(TransformersEngine(), folder), ScoringModel.load(folder, torch.float32, torch.device("cpu"))
    )
