"""Samples that a reward fails on, and drops, are compared with none."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from rlflow import algorithms
from rlflow.values.path import NO_GROUP


def test_groups_whose_rewards_differ_by_failures_alone_are_not_useful_to_dapo() -> None:
    dapo = object.__new__(algorithms.DAPO)
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    group = torch.tensor([3, 3, 3, 8, 8, 8])
    assert dapo.useful(SimpleNamespace(group=group), scores).tolist() == [True] * 6
    group[[1, 4]] = NO_GROUP
    assert dapo.useful(SimpleNamespace(group=group), scores).tolist() == [False] * 3 + [True, False, True]
