"""Which nodes the settings of an algorithm leave in its graph."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow import UserError
from rlflow.algorithms import GRPO, SFT
from rlflow.preparation import read_graph
from tests.controller.runs import OddCharacters

LEAST = {"rollout", "rewards", "advantages", "actor_loss"}


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, set()),
        ({"kl_coef": 0.1}, {"ref_logprobs"}),
        ({"epochs": 2}, {"old_logprobs"}),
        ({"samples_per_update": 4}, {"old_logprobs"}),
    ],
)
def test_grpo_has_the_nodes_that_its_settings_need(settings: dict[str, Any], more: set[str]) -> None:
    assert set(read_graph(GRPO("tiny", OddCharacters(), **settings)).nodes) == LEAST | more


def test_sft_is_one_node() -> None:
    assert set(read_graph(SFT("tiny")).nodes) == {"actor_loss"}


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(UserError, match="`group_size` is 1; group-relative advantages need at least 2"):
        GRPO("tiny", OddCharacters(), group_size=1)
