"""Validation by itself, without a training run around it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlflow import UserError
from rlflow.callbacks import Callback
from rlflow.controller.validation import powers_of_two
from rlflow.models.tiny import write_tiny_model
from rlflow.rewards import SampleReward
from rlflow.rollout.transformers import TransformersEngine
from rlflow.run.folder import RunFolder
from rlflow.strategies import SingleProcess
from rlflow.trainer import Trainer
from tests.controller.runs import grpo, sums


class First(Callback):
    """Keeps what the first validation said."""

    def on_validation_end(self, trainer: Trainer, module: Any, step: int, metrics: Any) -> None:
        if step == 0:
            self.metrics = dict(metrics)


class FirstCharacter(SampleReward):
    """Right where the prompt's first digit is 0 and the response is of an even number of characters."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return float(row["question"].startswith("0") and len(text) % 2 == 0)


def trainer(folder: Path, **settings: Any) -> Trainer:
    return Trainer(
        str(folder), accelerator="cpu", **{"strategy": SingleProcess(), "rollout": TransformersEngine(), **settings}
    )


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "run" / "model"  # where a run leaves it
    return write_tiny_model(folder, hidden_size=64, intermediate_size=96, layers=1, max_position=256)


def test_validate_says_what_the_first_validation_of_fit_says(policy: Path, tmp_path: Path) -> None:
    first = First()
    module, data = grpo(policy), sums(8, 2, held_out=3)
    trainer(tmp_path / "fit", max_steps=1, val_samples=4, callbacks=[first]).fit(module, data)
    found = trainer(tmp_path / "run", val_samples=4).validate(grpo(policy), data)
    assert found == {"problems": 3, **first.metrics}
    assert {"val/pass@1", "val/pass@2", "val/pass@4"} < found.keys()
    assert found["val/length"] > 1


def test_validate_builds_no_optimizer_and_no_model_but_the_one_that_generates(policy: Path, tmp_path: Path) -> None:
    strategy = SingleProcess()
    trainer(tmp_path / "run", strategy=strategy).validate(grpo(policy, kl_coef=0.1), sums(8, 2, held_out=3))
    assert list(strategy.roles) == ["actor"]
    assert strategy.roles["actor"].optimizer is None
    assert not any(weight.requires_grad for weight in strategy.roles["actor"].model.parameters())


def test_validate_leaves_its_numbers_beside_the_run_that_it_reads(policy: Path) -> None:
    found = trainer(policy.parent).validate(grpo(policy), sums(8, 2, held_out=3))
    left = RunFolder(policy.parent.with_name("run-validate"))
    assert json.loads(left.validation.read_text()) == found
    assert (policy / "model.safetensors").is_file()


def test_pass_at_k_counts_the_right_responses_of_each_prompt(policy: Path, tmp_path: Path) -> None:
    module = grpo(policy)
    module.reward = FirstCharacter()
    found = trainer(tmp_path / "run", val_samples=11).validate(module, sums(8, 2, held_out=3))
    # One of three prompts has all c right responses among its 11; the accuracy is c / 33.
    c = round(found["val/accuracy"] * 33)
    assert 0 < c < 10
    chance = {k: (1 - math.comb(11 - c, k) / math.comb(11, k)) / 3 for k in (1, 2, 4, 8)}
    assert {name: value for name, value in found.items() if "pass" in name} == {
        f"val/pass@{k}": pytest.approx(value, abs=1e-12) for k, value in chance.items()
    }


def test_at_most_so_many_batches_are_validated_on(policy: Path, tmp_path: Path) -> None:
    found = trainer(tmp_path / "run", limit_val_batches=2).validate(grpo(policy), sums(8, 2, held_out=7))
    assert found["problems"] == 4


def test_one_response_to_each_prompt_tells_no_pass_at_k(policy: Path, tmp_path: Path) -> None:
    found = trainer(tmp_path / "run").validate(grpo(policy), sums(8, 2, held_out=3))
    assert [name for name in found if "pass" in name] == []


def test_validate_without_held_out_prompts_is_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`data.validation` is not set"):
        trainer(tmp_path / "run").validate(grpo(policy), sums(8, 2))


def test_validate_of_a_checkpoint_is_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`trainer.ckpt_path` is 'last', and validation reads a model"):
        trainer(tmp_path / "run", ckpt_path="last").validate(grpo(policy), sums(8, 2, held_out=3))


def test_powers_of_two_end_at_or_below_the_limit() -> None:
    assert [powers_of_two(most) for most in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2], [1, 2, 4, 8]]
