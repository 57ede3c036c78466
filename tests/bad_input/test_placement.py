"""Roles, engines and steps that do not fit together end in one line that names the keys; exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bad_input.refusal import Case, Refused, ids, refusal
from tests.own_folder import REMOVED

CASES: list[Case] = [
    (
        "engines that do not divide the ranks",
        {"rollout": {"class_path": "rlflow.rollout.VLLMEngine", "init_args": {"tensor_parallel_size": 3}}},
        "`rollout.init_args.tensor_parallel_size` is 3, which does not divide the 1 ranks",
    ),
    ("ranks for one process", {"trainer.devices": 2}, "`trainer.devices` is 2; SingleProcess runs 1."),
    (
        "an engine of a policy that does not generate",
        {"engines": {"actr": {"class_path": "rlflow.rollout.TransformersEngine"}}},
        "`engines.actr` names 'actr', which is not a policy that generates; those are actor. Did you mean \"actor\"?",
    ),
    (
        "a policy that shares its own engine",
        {"engines": {"actor": {"share": "actor"}}},
        "`engines.actor.share` is 'actor', the policy itself; name another policy, whose engine it uses",
    ),
    (
        "a role that is not there",
        {"placement": {"actr": 0}},
        "`placement.actr` names no role of GRPO; its roles are rollout, actor.rollout, actor, reference.",
    ),
    (
        "a rank that is not there",
        {"placement": {"actor": "0-3"}},
        "`placement.actor` names the ranks 0-3, and the run has the ranks 0 to 0 (trainer.devices x trainer.num_nodes)",
    ),
    ("a role without ranks", {"placement": {"actor": []}}, "`placement.actor` names no ranks; name some, or leave"),
    (
        "sequences among more ranks than there are",
        {"placement": {"actor": {"sequence_parallel_size": 2}}},
        "`placement.actor.sequence_parallel_size` is 2, which does not divide the 1 ranks of `actor`; use one of [1]",
    ),
    (
        "heads that do not divide",
        {"trainer.devices": 3, "placement": {"actor": {"sequence_parallel_size": 3}}},
        "the sequence-parallel size of `actor` is 3, and its model has 4 attention heads",
    ),
    (
        "an engine across a border",
        {
            "trainer.devices": 3,
            "rollout": {"class_path": "rlflow.rollout.VLLMEngine", "init_args": {"tensor_parallel_size": 2}},
            "placement": {"rollout": "0-1", "actor": "1-2"},
        },
        "`placement` splits a rollout engine's ranks: ranks 0-1 share an engine"
        " (`rollout.init_args.tensor_parallel_size` 2), and among them only rank 1 hold `actor`; place",
    ),
    (
        "staleness where ranks do both",
        {"trainer.max_staleness": 1},
        "`trainer.max_staleness` is set and `rollout` cannot run ahead of training: rank 0 would both generate and"
        " train; place `rollout` and the trained roles on ranks of their own under `placement`",
    ),
    (
        "parts of two rollouts",
        {"module.class_path": "rlflow.algorithms.ReMax", "trainer.partial_rollout": 2},
        "`trainer.partial_rollout` is set, and `rollout` and `greedy` would have to wait for one another; leave it out",
    ),
    (
        "epochs of parts",
        {"trainer.partial_rollout": 2, "trainer.max_epochs": 2},
        "`trainer.max_epochs` is 2, and `trainer.partial_rollout` draws as many prompts as it needs, so passes over",
    ),
    ("parts of nothing", {"trainer.partial_rollout": 0}, "`trainer.partial_rollout` is 0; give 1 or more"),
    ("staleness below 0", {"trainer.max_staleness": -1}, "`trainer.max_staleness` is -1; give 0 or more steps"),
    ("no end", {"trainer.max_steps": REMOVED}, "neither `trainer.max_steps` nor `trainer.max_epochs` is set"),
    (
        "epochs where a filter draws",
        {"module.class_path": "rlflow.algorithms.DAPO", "trainer.max_epochs": 2},
        "`trainer.max_epochs` is 2, and the filter `useful` draws as many prompts as it needs, so passes over the rows"
        " do not say how many steps there are; set `trainer.max_steps` instead",
    ),
    (
        "no draws for a filter",
        {"module.class_path": "rlflow.algorithms.DAPO", "module.init_args.max_draws": 0},
        "`module.init_args.max_draws` is 0; give 1 or more",
    ),
]


@pytest.mark.parametrize(("changes", "line"), [case[1:] for case in CASES], ids=ids(CASES))
def test_what_does_not_fit_together_is_refused_in_one_line_before_a_model_is_loaded(
    refused: Refused,
    changes: dict[str, Any],
    line: str,
) -> None:
    assert line in refused(changes)


def test_a_rank_that_the_graph_has_not_is_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = refusal(capfd, "graph", "--config", "my.yaml", "--rank", "7")
    assert line == "`--rank` is 7, but the config has the ranks 0 to 0; name one"
