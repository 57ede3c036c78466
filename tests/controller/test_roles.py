"""Several trained roles of several kinds in one run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlflow import Optimizer, UserError
from rlflow.callbacks import Callback
from rlflow.module import handles
from rlflow.run.prepare import read_graph
from rlflow.run.schedules import counted
from tests.checkpoint_files import load_model
from tests.controller.runs import ActorCritic, Fit, StopsAfter, answers, fit, grpo, sums
from tests.controller.test_ranks import FLOAT32, difference
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.strategy_update import Stage, strategy_of

LENGTHS = (3, 9, 1, 12, 5, 2, 7, 4)
ADAMW = Optimizer("adamw", lr=1e-2)


def saved(folder: Path) -> dict[str, dict[str, Tensor]]:
    """The weights of both roles that a run left."""
    return {name: load_model(folder / name) for name in ("model", "model-critic")}


@pytest.mark.parametrize("stage", slow_but((3, "fsdp"), (0, 1, 2, 3, "fsdp")))
def test_an_actor_and_a_critic_train_alike_at_every_stage_and_both_are_saved(
    stage: Stage, policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    def run(name: str, **given: Any) -> Fit:
        return Fit(ActorCritic(str(policy)), answers(LENGTHS, 4), tmp_path / name, settings={"max_steps": 2}, **given)

    (alone,) = [fit(run("alone"))]
    expected, start = saved(tmp_path / "alone"), load_file(policy / "model.safetensors")
    assert (tmp_path / "alone/model-critic/tokenizer.json").is_file()
    assert expected["model-critic"]["score.weight"].any()
    assert alone.steps[0]["critic/value"] == 0  # a new output layer
    assert alone.steps[1]["critic/value"] != 0
    assert difference({k: expected["model"][k] for k in start}, start) > 1e-3
    for result in ranks2.run(fit, run("ranks", strategy=partial(strategy_of, stage))):
        for metric in ("actor/loss", "critic/loss", "critic/grad_norm", "critic/value", "critic/last_value"):
            assert result.steps[1][metric] == pytest.approx(alone.steps[1][metric], rel=1e-4), metric
    found = saved(tmp_path / "ranks")
    assert all(difference(found[name], expected[name]) < FLOAT32 for name in expected)


def test_a_reference_stays_what_it_was_at_the_start(policy: Path, tmp_path: Path) -> None:
    module = grpo(policy, kl_coef=0.01, kl_kind="k2")
    first, second = fit(Fit(module, sums(12, 3), tmp_path / "run", settings={"max_steps": 2})).steps
    assert first["actor/kl"] < 1e-12  # of the policy from itself, but for rounding
    assert second["actor/kl"] > 1e-4  # before the second update: what the first one moved


def test_a_run_with_a_critic_and_an_actor_that_starts_later_resumes_to_the_bit(policy: Path, tmp_path: Path) -> None:
    def run(name: str, stop: int, ckpt_path: str | None = None) -> list[dict[str, float]]:
        settings = {"max_steps": 4, "save_every_n_steps": 9, "ckpt_path": ckpt_path, "callbacks": [StopsAfter(stop)]}
        optimizer = Optimizer("adamw", lr=1e-2, warmup_steps=1, schedule="linear")
        module = ActorCritic(str(policy), optimizer, actor_start_step=2)
        return fit(Fit(module, answers(LENGTHS, 4), tmp_path / name, settings=settings)).steps

    steps = run("through", 4)
    assert ["actor/loss" in step for step in steps] == [False, False, True, True]
    assert all("critic/loss" in step for step in steps)
    run("parts", 3)
    folder = tmp_path / "parts/checkpoint/step-00000003"
    actor, critic = (json.loads((folder / f"{name}.json").read_text()) for name in ("actor", "critic"))
    assert (actor["updates"], critic["updates"]) == (1, 3)
    run("parts", 4, "last")
    through, parts = saved(tmp_path / "through"), saved(tmp_path / "parts")
    for role in through:
        assert all(torch.equal(tensor, parts[role][name]) for name, tensor in through[role].items()), role


def test_before_its_first_step_a_role_keeps_its_weights_and_the_policy_its_version(
    policy: Path, tmp_path: Path
) -> None:
    class Late(Callback):
        versions: list[int]

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.versions = []

        def on_weight_sync(self, trainer: Any, module: Any, policy: str, version: int) -> None:
            assert (policy, trainer.settings.max_steps) == ("actor", 4)
            self.versions.append(version)

    module, syncs = grpo(policy), Late()
    configure = module.configure_models

    def start_late() -> None:
        configure()
        module.actor.start_step = 2

    module.configure_models = start_late  # type: ignore[method-assign]
    fit(Fit(module, sums(8, 2), tmp_path / "run", settings={"max_steps": 4, "callbacks": [syncs]}))
    assert syncs.versions == [0, 0, 0, 1]  # the engine forgets its weights after every rollout


def test_a_schedule_counts_the_steps_that_train(policy: Path) -> None:
    module = ActorCritic(str(policy), actor_start_step=3)
    module.configure_models()
    graph = read_graph(module)
    assert [counted(module, graph, role, prompts=4, steps=10) for role in handles(module)] == [7, 10]


def test_a_critic_with_another_vocabulary_is_refused_in_one_line(policy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in policy.iterdir():
        text = file.read_bytes()
        if file.name == "tokenizer.json":
            text = text.replace(b'"a": 97', b'"a": 98').replace(b'"b": 98', b'"b": 97')
        (other / file.name).write_bytes(text)

    class Foreign(ActorCritic):
        def configure_models(self) -> None:
            super().configure_models()
            self.critic.model = str(other)

    with pytest.raises(UserError, match=r"`critic` is '.*other', whose tokenizer is not that of `actor`") as refusal:
        fit(Fit(Foreign(str(policy)), answers(LENGTHS, 4), tmp_path / "run"))
    assert "'a' is 98 there and 97 here, one of 2 tokens" in str(refusal.value)
    assert "\n" not in str(refusal.value)
