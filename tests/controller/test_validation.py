"""Validation by itself, without a training run around it."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlflow import CausalLM, PromptData, UserError
from rlflow.algorithms import SFT
from rlflow.callbacks import Callback
from rlflow.controller.validation import powers_of_two
from rlflow.functional import Aggregation
from rlflow.models.tiny import write_tiny_model
from rlflow.rewards import SampleReward
from rlflow.rollout.transformers import TransformersEngine
from rlflow.run.folder import RunFolder
from rlflow.strategies import DeepSpeedStrategy, SingleProcess
from rlflow.trainer import Trainer
from tests.controller.runs import Fit, fit, grpo, sums
from tests.ranks import RankPool


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


def test_validate_writes_its_numbers_into_the_folder_of_the_run_that_it_reads(policy: Path) -> None:
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


def test_pass_at_k_is_not_logged_for_one_response_to_each_prompt(policy: Path, tmp_path: Path) -> None:
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


def tiny_policy(folder: Path) -> Path:
    return write_tiny_model(folder / "policy", hidden_size=64, intermediate_size=96, layers=1, max_position=256)


def talks(count: int) -> list[dict[str, Any]]:
    """Conversations of several lengths, in which only the policy's turns count."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"{i}+{i}"},
                {"role": "assistant", "content": "7" * (1 + i % 4)},
                {"role": "user", "content": "sure?" * (i % 3) + "?"},
                {"role": "assistant", "content": "abcdefgh"[: 1 + 3 * i % 8]},
            ]
        }
        for i in range(count)
    ]


def by_hand(model: Path, rows: list[dict[str, Any]], mode: str, longest: int) -> tuple[float, float]:
    """Loss and accuracy of the policy's turns, row by row in float64, by transformers alone."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    losses, right = [], 0
    for row in rows:
        ids: list[int] = []
        spoken: list[bool] = []
        for message in row["messages"]:  # the template of the tiny model, turn by turn
            before = tokenizer(f"<|im_start|>{message['role']}\n")["input_ids"]
            said = tokenizer(f"{message['content']}<|im_end|>")["input_ids"]
            end = tokenizer("\n")["input_ids"]
            own = message["role"] == "assistant"
            ids += before + said + end
            spoken += [False] * len(before) + [own] * len(said) + [False] * len(end)
        logits = network(torch.tensor([ids])).logits[0, :-1]
        labels, mask = torch.tensor(ids[1:]), torch.tensor(spoken[1:])
        losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none")[mask])
        right += int((logits.argmax(1) == labels)[mask].sum())
    tokens = sum(len(loss) for loss in losses)
    loss = {
        "token-mean": torch.cat(losses).mean(),
        "sequence-mean-token-mean": torch.stack([each.mean() for each in losses]).mean(),
        "sequence-mean-token-sum": torch.stack([each.sum() for each in losses]).mean(),
        "constant": torch.cat(losses).sum() / (longest * len(losses)),
        "episode-mean": torch.stack([each.mean() for each in losses]).mean(),  # a row of the dataset is an episode
    }[mode]
    return float(loss), right / tokens


@pytest.mark.parametrize("mode", get_args(Aggregation))
@torch.no_grad()
def test_the_loss_of_held_out_rows_is_that_of_the_float64_reference(mode: Aggregation, tmp_path: Path) -> None:
    policy, rows = tiny_policy(tmp_path), talks(7)
    module = SFT(CausalLM(str(policy)), max_response_length=9, loss_aggregation=mode)
    found = trainer(tmp_path / "run").validate(module, rows)
    loss, accuracy = by_hand(policy, rows, mode, longest=9)
    assert found == {
        "problems": 7,
        "val/loss": pytest.approx(loss, rel=1e-6),
        "val/token_accuracy": pytest.approx(accuracy, abs=1e-12),
    }


def test_the_loss_of_held_out_rows_is_the_same_on_any_ranks_and_micro_batches(tmp_path: Path, ranks2: RankPool) -> None:
    policy, rows = tiny_policy(tmp_path), talks(9)
    data = PromptData(talks(4), rows, prompts_per_step=2)

    def run(name: str, strategy: Any) -> Fit:
        return Fit(SFT(CausalLM(str(policy))), data, tmp_path / name, strategy)

    one = fit(run("one", SingleProcess)).summary
    small = fit(run("small", partial(SingleProcess, token_budget=16))).summary
    two = ranks2.run(fit, run("two", partial(DeepSpeedStrategy, 3, token_budget=40)))
    assert one["loss_before"] > one["loss_after"]  # the run's one step
    for other in (small, *(each.summary for each in two)):
        for name in ("loss_before", "loss_after", "token_accuracy_before", "token_accuracy_after"):
            assert other[name] == pytest.approx(one[name], rel=1e-6), name
