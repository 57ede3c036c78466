"""Refusals of a module outside a run."""

from __future__ import annotations

import pytest
import torch

from rlflow import RLModule, UserError


def test_what_a_step_provides_is_refused_outside_of_one() -> None:
    with pytest.raises(UserError, match="no step in progress here; call this in a node or in `validation_step`"):
        RLModule().mean(torch.ones(2))


def test_numbers_per_token_are_not_logged_without_a_mask() -> None:
    with pytest.raises(UserError, match=r"log\('kl'\) was given \[2, 3\] without a mask"):
        RLModule().log("kl", torch.ones(2, 3))


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(UserError, match=r"log\('kl'\) was given \[2, 3\] with a mask of \[2, 1\]"):
        RLModule().log("kl", torch.ones(2, 3), torch.ones(2, 1, dtype=torch.bool))


def test_a_module_without_a_reward_scores_nothing() -> None:
    with pytest.raises(UserError, match="RLModule has no reward"):
        RLModule().reward_function(None)  # type: ignore[arg-type]
