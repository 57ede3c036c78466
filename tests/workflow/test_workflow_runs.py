"""A workflow of a config trains like the class with the same nodes, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.commands.fit import read_fit
from rlflow.models.tiny import write_tiny_model
from rlflow.module import RLModule
from tests.controller.runs import ZERO2, Fit, OddCharacters, Result, fit, sums
from tests.ranks import RankPool

CONFIGS = Path(__file__).parent.parent.parent / "configs"
ASIDE = ("time/", "exchange/")  # and bytes: a workflow says of each parameter which field it reads
STEPS = 2
RESTRAINED = """
models:
  reference: {class_path: rlflow.CausalLM, init_args: {model: MODEL, trainable: false}}
  actor: {init_args: {samples_per_update: 8}}
nodes:
  ref_logprobs: {call: reference.logprobs, inputs: {rows: rollout}}
  old_logprobs: {call: actor.logprobs, inputs: {rows: rollout}}
  actor_loss:
    settings:
      kl: {coef: 0.1}
      entropy_coef: 0.01
      importance: {level: geometric, mode: mask, low: 0.9, high: 1.1}
"""

LOGGED = """
nodes:
  white: {call: whiten, inputs: {x: rewards}, returns: PerSample}
  squared: {call: tests.workflow.steps.squared, inputs: {x: white}}
  log_white: {call: log, inputs: {value: white}, settings: {name: reward/white}}
  log_squared: {call: log, inputs: {value: squared}, settings: {name: reward/white_squared}}
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights."""
    folder = tmp_path_factory.mktemp("policy") / "policy"
    return write_tiny_model(folder, seed=1, hidden_size=128, intermediate_size=96, layers=2, max_position=256)


def module(*arguments: str) -> RLModule:
    """A config's module, with a reward and an end of responses that suit random weights."""
    configured = read_fit(arguments).module
    configured.reward = OddCharacters()
    configured.stop_token_ids = tuple(range(40, 60))
    return configured


def run(of: RLModule, folder: Path, **given: Any) -> Fit:
    return Fit(of, sums(16, prompts_per_step=4), folder, settings={"max_steps": STEPS}, **given)


def assert_equal(found: Result, expected: Result) -> None:
    """Every weight and every metric that is not a time."""
    assert len(found.steps) == STEPS
    assert found.weights.keys() == expected.weights.keys()
    assert all(torch.equal(weight, expected.weights[name]) for name, weight in found.weights.items())
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        assert {"actor/loss", "actor/grad_norm", "actor/clip_fraction", "reward/mean"} <= ours.keys()
        names = [name for name in ours if not name.startswith(ASIDE)]
        assert [(name, ours[name]) for name in names] == [(name, theirs[name]) for name in names]


@pytest.fixture
def workflow(policy: Path) -> RLModule:
    return module("--config", str(CONFIGS / "workflow_grpo.yaml"), "--models.actor.init_args.model", str(policy))


@pytest.fixture
def algorithm(policy: Path) -> RLModule:
    return module("--config", str(CONFIGS / "grpo.yaml"), "--module.actor.model", str(policy))


def test_the_workflow_that_is_shipped_trains_as_grpo_does(
    workflow: RLModule, algorithm: RLModule, tmp_path: Path
) -> None:
    expected = fit(run(algorithm, tmp_path / "algorithm"))
    assert len({step["actor/loss"] for step in expected.steps}) == STEPS  # it learns
    assert_equal(fit(run(workflow, tmp_path / "workflow")), expected)


def test_a_workflow_trains_as_its_algorithm_does_on_two_ranks(
    workflow: RLModule, algorithm: RLModule, tmp_path: Path, ranks2: RankPool
) -> None:
    theirs = ranks2.run(fit, run(algorithm, tmp_path / "algorithm", strategy=ZERO2))
    for found, expected in zip(
        ranks2.run(fit, run(workflow, tmp_path / "workflow", strategy=ZERO2)), theirs, strict=True
    ):
        assert_equal(found, expected)


def test_a_config_on_top_adds_a_reference_and_more_updates_as_settings_of_grpo_do(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "restrained.yaml").write_text(RESTRAINED.replace("MODEL", str(policy)))
    shipped, actor = str(CONFIGS / "workflow_grpo.yaml"), ["--models.actor.init_args.model", str(policy)]
    ours = module("--config", shipped, "--config", str(tmp_path / "restrained.yaml"), *actor)
    theirs = module(
        *(
            "--config",
            str(CONFIGS / "grpo.yaml"),
            "--module.actor.model",
            str(policy),
            "--module.actor.samples_per_update",
            "8",
        ),
        *("--module.kl.coef", "0.1", "--module.entropy_coef", "0.01"),
        *("--module.importance", "{level: geometric, mode: mask, low: 0.9, high: 1.1}"),
    )
    expected = fit(run(theirs, tmp_path / "algorithm"))
    assert expected.steps[-1]["actor/kl"] > 0
    assert_equal(fit(run(ours, tmp_path / "workflow")), expected)


def test_a_value_is_whitened_over_all_rows_and_logged(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text(LOGGED)
    shipped, actor = str(CONFIGS / "workflow_grpo.yaml"), ("--models.actor.init_args.model", str(policy))
    logged = fit(run(module("--config", shipped, "--config", str(tmp_path / "more.yaml"), *actor), tmp_path / "run"))
    assert logged.steps[0]["reward/mean"] > 0.1
    assert logged.steps[0]["reward/white"] == pytest.approx(0, abs=1e-6)
    # squares of 32 whitened values sum to 31, one less for the mean that was taken off
    assert logged.steps[0]["reward/white_squared"] == pytest.approx(31 / 32, rel=1e-5)
