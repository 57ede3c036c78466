"""Samples that a reward fails on are compared with none, in every algorithm that compares samples."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from rlflow import algorithms
from rlflow.dag.failures import scores_rows, telling
from rlflow.dag.methods import read_methods

COMPARED = {  # the node that compares, by algorithm; None where each sample stands for itself
    "GAIL": None,
    "OnPolicyDistillation": None,
    "PolicyGradient": None,  # a base
    "RAFT": None,  # its pairs are left out by group
    "ReMax": None,
    "SelfPlay": "answer_advantages",
    "TreeRL": "value",
}
FOUND = {
    name: kind
    for name, kind in vars(algorithms).items()
    if inspect.isclass(kind) and any(map(scores_rows, read_methods(object.__new__(kind)).nodes.values()))
}


@pytest.mark.parametrize("name", sorted(name for name in FOUND if COMPARED.get(name, "advantages")))
def test_what_compares_samples_asks_which_of_them_failed(name: str) -> None:
    nodes = read_methods(object.__new__(FOUND[name])).nodes
    compares = COMPARED.get(name) or "advantages"
    tells, _ = telling(nodes)
    for node in nodes.values():
        asks = any(value.name in tells for value in node.inputs)
        assert asks or (node.id != compares and node.kind != "filter"), node.id


def test_groups_that_only_failures_tell_apart_are_not_useful_to_dapo() -> None:
    dapo = object.__new__(algorithms.DAPO)
    rollout = SimpleNamespace(group=torch.tensor([3, 3, 3, 8, 8, 8]))
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    failures = torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.uint8)
    assert dapo.useful(rollout, scores).tolist() == [True] * 6
    assert dapo.useful(rollout, scores, failures).tolist() == [False] * 3 + [True] * 3
