"""Runs on rows with pictures: engine and trainer read the same ones, wherever the rows travel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow import CausalLM, RLModule
from rlflow.algorithms import GRPO, SelfDistillation, SelfPlay
from rlflow.data import RandomRows
from rlflow.data.prompts import PromptData
from rlflow.functional import KL
from tests.controller.runs import SGD, ZERO2, Fit, OddCharacters, failing_fit, fit
from tests.ranks import RankPool
from tests.slow import slow_but


def cells() -> PromptData:
    return PromptData(
        RandomRows("rlflow.configs.cells.count", 16),
        validation=RandomRows("rlflow.configs.cells.count", 4, seed=1),
        prompts_per_step=4,
        prompt="question",
        images="image",
    )


def run(folder: Path, **more: Any) -> Fit:
    actor = CausalLM("tiny_vision", optimizer=SGD)
    module = GRPO(actor, reward=OddCharacters(), kl=KL(0.1), group_size=2, max_response_length=4)
    settings = {"max_steps": 2, "val_check_interval": 2, **more.pop("settings", {})}
    return Fit(module, cells(), folder, settings=settings, **more)


@pytest.mark.parametrize("name", slow_but(["SelfPlay"], ["SelfPlay", "SelfDistillation"]))
def test_an_algorithm_that_writes_its_own_prompts_is_given_no_rows_with_pictures(name: str, tmp_path: Path) -> None:
    modules: dict[str, RLModule] = {
        "SelfPlay": SelfPlay("tiny_vision", "tiny_vision", OddCharacters()),
        "SelfDistillation": SelfDistillation("tiny_vision", reward=OddCharacters()),
    }
    failed = failing_fit(Fit(modules[name], cells(), tmp_path))
    assert failed.error.startswith(f"rows of the data have images, and nodes of {name} write prompts")
    assert failed.weights == {}  # none was loaded


@pytest.mark.slow
def test_roles_apart_train_on_the_pictures_that_were_generated_from(tmp_path: Path, ranks2: RankPool) -> None:
    alone = fit(run(tmp_path / "alone"))
    placement = {"placement": {"rollout": [0], "actor": [1], "reference": [1]}}
    of_ranks = ranks2.run(fit, run(tmp_path / "apart", strategy=ZERO2, settings=placement))
    for steps in (alone.steps, of_ranks[0].steps):
        # A picture of another row would move the logprobs of random weights by 0.1 and more.
        assert all(step["sync/logprob_gap_max"] < 1e-5 for step in steps if "sync/logprob_gap_max" in step)
    assert any("sync/logprob_gap_max" in step for step in of_ranks[0].steps)
    for name, weight in of_ranks[1].weights.items():
        torch.testing.assert_close(weight, alone.weights[name], rtol=0, atol=1e-5)
    # 8 rows of 17 prompt tokens; their pictures are 9,408 bytes each as files, and 37,632 as tensors
    assert max(step["exchange/bytes"] for step in of_ranks[0].steps) < 8_000
