"""A trained model, its moving average, and the divergence between them, in whole runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlflow import Batch, CausalLM, Optimizer, PerToken, RLModule, Rollout, UserError, node
from rlflow.data.prompts import PromptData
from rlflow.run.placement import Place
from rlflow.strategies import SingleProcess, TrainingStrategy
from rlflow.types import Ragged
from tests.controller.runs import Fit, Result, StopsAfter, fit
from tests.controller.test_ranks import FLOAT32, difference
from tests.data.list_source import Listed
from tests.ranks import RankPool
from tests.strategies.strategy_update import Stage, strategy_of

STEPS, DECAY = 3, 0.5


class SelfDistillation(RLModule):
    """The policy is its own teacher, which has read the solution."""

    group_size = 2
    max_response_length = 8
    stop_token_ids = tuple(range(40, 60))

    def __init__(self, model: str, decay: float = DECAY) -> None:
        self.actor = CausalLM(model, optimizer=Optimizer("adamw", lr=3e-3), samples_per_update=4)
        self.decay = decay

    def configure_models(self) -> None:
        self.teacher = self.actor.averaged(self.decay)

    @node(role="rollout")
    def rollout(self, batch: Batch) -> Rollout:
        return self.generate(batch, self.group_size)

    @node
    def hinted(self, batch: Batch) -> Ragged:
        solutions = Ragged(batch.response_ids[batch.loss_mask], batch.lengths)
        return batch.prompt_ids.each_followed_by(solutions)

    @node(role="actor", type="train", uses="teacher")
    def actor_loss(self, rollout: Rollout, hinted: Ragged) -> PerToken:
        return self.actor.kl(rollout, self.teacher, given=hinted)


class Regularized(SelfDistillation):
    """The average scores in a node of its own, as a reference does."""

    @node(role="teacher")
    def ref_logprobs(self, rollout: Rollout) -> PerToken:
        return self.teacher.logprobs(rollout)

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Rollout, ref_logprobs: PerToken) -> PerToken:
        logprobs = self.actor.logprobs(rollout)
        self.log("actor/apart", (logprobs.detach() - ref_logprobs).abs(), rollout.loss_mask)
        return -logprobs


def problems() -> PromptData:
    rows = [{"question": f"{i}+{i * 7 % 10}=", "answer": "x" * (3 + 5 * (i % 3))} for i in range(9)]
    return PromptData(Listed(rows), None, 3, response="answer")


def run(policy: Path, folder: Path, module: type[RLModule] = SelfDistillation, **given: Any) -> Fit:
    settings = {"max_steps": STEPS, "save_every_n_steps": 9, **given.pop("settings", {})}
    return Fit(module(str(policy)), problems(), folder, settings=settings, **given)  # type: ignore[call-arg]


def weights_in(checkpoint: Path, role: str) -> dict[str, Tensor]:
    """Full tensors of a role in a checkpoint of one rank."""
    tensors = load_file(checkpoint / f"{role}-00000-of-00001.safetensors")
    named = {key: tensor for key, tensor in tensors.items() if key.endswith("/weight")}
    return {key.removesuffix("/weight"): tensor for key, tensor in named.items()}


def last_of(folder: Path) -> Path:
    return sorted((folder / "checkpoint").iterdir())[-1]


@pytest.fixture(scope="module")
def alone(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("alone") / "run"
    return fit(run(policy, folder)), folder


def test_the_policy_comes_nearer_to_its_teacher_and_the_engine_is_compared(alone: tuple[Result, Path]) -> None:
    steps = alone[0].steps
    assert steps[0]["actor/loss"] > 0
    assert all(0 < step["sync/logprob_gap"] < 1e-4 for step in steps)  # measured by the pass that `kl` makes


@pytest.mark.parametrize("stage", [3, "fsdp"])
def test_two_ranks_come_to_what_one_does(
    stage: Stage, policy: Path, alone: tuple[Result, Path], tmp_path: Path, ranks2: RankPool
) -> None:
    strategy: partial[TrainingStrategy] = partial(strategy_of, stage, token_budget=40)
    for result in ranks2.run(fit, run(policy, tmp_path / "run", strategy=strategy)):
        for found, expected in zip(result.steps, alone[0].steps, strict=True):
            assert found["actor/loss"] == pytest.approx(expected["actor/loss"], rel=1e-4)
        assert difference(result.weights, alone[0].weights) < FLOAT32


def test_a_run_with_an_average_resumes_from_a_checkpoint_to_the_bit(
    policy: Path, alone: tuple[Result, Path], tmp_path: Path
) -> None:
    fit(run(policy, tmp_path / "parts", settings={"callbacks": [StopsAfter(2)]}))
    fit(run(policy, tmp_path / "parts", settings={"ckpt_path": "last", "callbacks": [StopsAfter(99)]}))
    for role in ("actor", "teacher"):
        expected, found = (weights_in(last_of(each), role) for each in (alone[1], tmp_path / "parts"))
        assert expected
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_the_average_moves_once_a_step_after_all_updates_of_its_owner(policy: Path, tmp_path: Path) -> None:
    settings = {"save_every_n_steps": 1, "save_last": STEPS + 1}
    first, second, _ = fit(run(policy, tmp_path, Regularized, settings=settings)).steps
    # The step's samples are scored before its two updates, the second of which sees what the first one changed.
    assert 1e-4 < first["actor/apart"] < second["actor/apart"]
    average = {
        key: tensor.flatten() for key, tensor in load_file(policy / "model.safetensors").items() if "lm_head" not in key
    }
    for folder in sorted((tmp_path / "checkpoint").iterdir()):
        owner, found = (weights_in(folder, role) for role in ("actor", "teacher"))
        average = {key: tensor + (owner[key] - tensor) * (1 - DECAY) for key, tensor in average.items()}
        assert all(torch.equal(found[key], tensor) for key, tensor in average.items())


class Records(SelfDistillation):
    """Records of each micro-batch how many rows it has, and how many tokens the teacher reads."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.record: list[tuple[int, int]] = []

    @node(role="actor", type="train", uses="teacher")
    def actor_loss(self, rollout: Rollout, hinted: Ragged) -> PerToken:
        self.record.append((len(hinted), int((hinted.lengths + rollout.lengths - 1).sum())))
        return super().actor_loss(rollout, hinted)


def test_micro_batches_are_cut_by_the_longer_of_both_prompts(policy: Path, tmp_path: Path) -> None:
    budget = 60  # of a long hint two rows do not fit; of short ones, and without hints, all four of an update do
    rows = [{"question": f"{i}=", "answer": "x" * (40 if i % 2 else 1)} for i in range(6)]
    settings: dict[str, Any] = {"max_steps": 2, "save_every_n_steps": None}
    data, strategy = PromptData(Listed(rows), None, 3, response="answer"), partial(SingleProcess, token_budget=budget)
    record = fit(Fit(Records(str(policy)), data, tmp_path, strategy, settings=settings)).record
    assert max(tokens for _, tokens in record) <= budget
    assert max(rows for rows, _ in record) > 1


class _NoSuch(SelfDistillation):
    @node(role="actor", type="train", uses="techer")
    def actor_loss(self, rollout: Rollout) -> PerToken:
        return self.actor.logprobs(rollout)


class _Trainable(SelfDistillation):
    def configure_models(self) -> None:
        super().configure_models()
        self.teacher = CausalLM(self.actor.model)


class _AverageAlone(SelfDistillation):
    def configure_models(self) -> None:
        super().configure_models()
        self.teacher = CausalLM(self.actor.model).averaged(0.9)


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        (_NoSuch, {}, "uses `techer`, which names no model handle of the module. Did you mean "),
        (_Trainable, {}, "node `actor_loss` uses `teacher`, which is trainable, and no node trains it"),
        (_AverageAlone, {}, "`teacher` is the moving average of a model that no node trains"),
        (SelfDistillation, {"placement": {"teacher": Place(0)}}, "`teacher` is a moving average, which lives where"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    module: type[RLModule], settings: dict[str, Any], message: str, policy: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        fit(run(policy, tmp_path, module, settings=settings))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
