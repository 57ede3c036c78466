"""Training on pairs of responses, and what a module measures itself on held-out ones."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlflow import CausalLM, LoRA, Optimizer, Pairs, PerSample, RewardModel, UserError, node
from rlflow.algorithms import DPO, SFT, RewardModelTraining
from rlflow.callbacks import Callback, EarlyStopping
from rlflow.data.prompts import PromptData
from rlflow.models.tiny import tiny_tokenizer, write_tiny_model
from rlflow.rollout.transformers import TransformersEngine
from rlflow.strategies import DeepSpeedStrategy, SingleProcess
from rlflow.trainer import Trainer
from rlflow.types import WithDatasetRows
from rlflow.values.ragged import Ragged
from tests.checkpoint_files import load_model
from tests.controller.runs import SGD, Fit, RecordingSFT, answers, fit
from tests.data.list_source import Listed
from tests.ranks import RankPool
from tests.reference.pairs_float64 import Pair, dpo_update, reward_model_update
from tests.reference.update import Step, Update

ROWS = [
    {"question": f"{i}+{i}=", "good": "abcdefghijklm"[:good], "bad": "nopqrstuvwxyz"[:bad]}
    for i, (good, bad) in enumerate([(1, 9), (12, 2), (3, 3), (0, 5), (7, 1)])
]
BETA = 0.5


def data(prompts_per_step: int = 5, held_out: int = 0) -> PromptData:
    validation = Listed(ROWS[:held_out]) if held_out else None
    return PromptData(Listed(ROWS), validation, prompts_per_step, response="good", rejected="bad")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another model than the policy, so that margins differ from 0 before the first step."""
    folder = tmp_path_factory.mktemp("reference") / "reference"
    return str(write_tiny_model(folder, seed=2, hidden_size=128, intermediate_size=96, layers=2, max_position=256))


def dpo(policy: Path, reference: str) -> DPO:
    return DPO(CausalLM(str(policy), optimizer=SGD), BETA, reference=CausalLM(reference))


class NeverSetUp(TransformersEngine):
    """Must not be needed."""

    def setup(self, *arguments: Any, **settings: Any) -> None:
        raise AssertionError("nothing generates")


def encoded(text: str) -> list[int]:
    ids: list[int] = tiny_tokenizer()(text)["input_ids"]
    return ids


def paired() -> list[Pair]:
    """The rows as the float64 references read them."""
    return [Pair(encoded(row["question"]), [*encoded(row["good"]), 0], [*encoded(row["bad"]), 0]) for row in ROWS]


def off_course(model: Path, expected: Update) -> float:
    """By how much what a run changed in a model differs from what it should have, as a share of that."""
    found = load_model(model)
    start = {name: weight + SGD.lr * expected.gradient[name] for name, weight in expected.after_sgd.items()}
    moved = torch.cat([(found[name] - start[name]).flatten() for name in start])
    wanted = torch.cat([(expected.after_sgd[name] - start[name]).flatten() for name in start])
    return float((moved - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("packing", [True, False])
def test_an_update_on_pairs_over_ranks_and_micro_batches_is_that_of_the_whole(
    packing: bool, policy: Path, reference: str, tmp_path: Path, ranks2: RankPool
) -> None:
    strategy = partial(DeepSpeedStrategy, 2, token_budget=20, packing=packing)  # of 14 to 29 tokens a pair
    expected = dpo_update(policy, reference, paired(), BETA, Step(lr=SGD.lr))
    for result in ranks2.run(fit, Fit(dpo(policy, reference), data(), tmp_path, strategy)):
        assert result.steps[0]["actor/loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert off_course(tmp_path / "model", expected) < 1e-5


def test_an_update_of_a_reward_model_is_that_of_the_whole(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    torch.manual_seed(0)  # of the output layer
    AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1).save_pretrained(tmp_path / "start")
    tiny_tokenizer().save_pretrained(tmp_path / "start")
    expected = reward_model_update(tmp_path / "start", paired(), Step(lr=SGD.lr))
    run = Fit(
        RewardModelTraining(RewardModel(str(tmp_path / "start"), optimizer=SGD)),
        data(),
        tmp_path / "run",
        partial(DeepSpeedStrategy, 2, token_budget=20),
        NeverSetUp(),
    )
    for result in ranks2.run(fit, run):
        assert result.steps[0]["reward_model/loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert off_course(tmp_path / "run/model", expected) < 1e-5


def test_a_run_without_a_language_model_to_train_measures_and_leaves_a_reward_model(
    policy: Path, tmp_path: Path
) -> None:
    optimizer = Optimizer(lr=1e-2)
    run = Fit(
        RewardModelTraining(RewardModel(str(policy), optimizer=optimizer)),
        data(held_out=5),
        tmp_path / "run",
        engine=NeverSetUp(),
        settings={"max_steps": 5, "save_every_n_steps": 2},
    )
    summary = fit(run).summary
    assert (summary["accuracy_before"], summary["margin_before"]) == (0.5, 0.0)  # a new output layer is of zeros
    assert summary["loss_after"] < summary["loss_before"] == pytest.approx(math.log(2))
    frozen = Trainer(str(tmp_path / "run"), accelerator="cpu", strategy=SingleProcess())
    found = frozen.validate(RewardModelTraining(RewardModel(str(tmp_path / "run/model"))), data(held_out=5))
    assert found["val/margin"] == pytest.approx(summary["margin_after"], rel=1e-5)


def test_what_a_module_measures_is_the_same_on_one_rank_and_on_two(
    policy: Path, reference: str, tmp_path: Path, ranks2: RankPool
) -> None:
    alone = fit(Fit(dpo(policy, reference), data(held_out=3), tmp_path / "1")).summary
    several = ranks2.run(
        fit, Fit(dpo(policy, reference), data(held_out=3), tmp_path / "2", partial(DeepSpeedStrategy, 2))
    )
    for summary in (result.summary for result in several):
        for name in ("margin_before", "margin_after", "accuracy_before", "accuracy_after"):
            assert summary.get(name, alone[name]) == pytest.approx(alone[name], abs=1e-5)
    assert several[0].summary.keys() == alone.keys()
    assert alone["margin_after"] > alone["margin_before"]


def test_a_run_without_a_language_model_to_train_resumes_to_the_bit(policy: Path, tmp_path: Path) -> None:
    def run(steps: int, name: str, **settings: Any) -> dict[str, Any]:
        module = RewardModelTraining(RewardModel(str(policy), optimizer=Optimizer(lr=1e-2)))
        settings |= {"max_steps": steps, "save_every_n_steps": 2}
        return fit(Fit(module, data(2, held_out=5), tmp_path / name, settings=settings)).summary

    straight = run(4, "straight")
    run(2, "torn")
    assert run(4, "torn", ckpt_path="last") | {"seconds": 0} == straight | {"seconds": 0}


def test_dpo_of_adapters_is_measured_against_the_model_without_them(policy: Path, tmp_path: Path) -> None:
    module = DPO(CausalLM(str(policy), optimizer=Optimizer(lr=1e-2), lora=LoRA()), BETA)
    strategy = SingleProcess()
    summary = fit(Fit(module, data(held_out=3), tmp_path / "run", lambda: strategy, settings={"max_steps": 5})).summary
    assert list(strategy.roles) == ["actor"]  # no second copy
    assert summary["margin_before"] == 0.0
    assert summary["margin_after"] > 0.1


class Seen(Callback):
    """Keeps what each validation said, by step."""

    def __init__(self) -> None:
        self.validations: dict[int, dict[str, float]] = {}

    def on_validation_end(self, trainer: Trainer, module: Any, step: int, metrics: Any) -> None:
        self.validations[step] = dict(metrics)


def test_a_module_measures_before_the_first_step_when_it_is_due_and_at_the_end(
    policy: Path, reference: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen = Seen()
    settings = {"max_steps": 3, "val_check_interval": 2, "callbacks": [seen]}
    summary = fit(Fit(dpo(policy, reference), data(held_out=3), tmp_path, settings=settings)).summary
    assert list(seen.validations) == [0, 2, 3]
    assert all(of.keys() == {"val/margin", "val/accuracy"} for of in seen.validations.values())
    ends = summary["margin_before"], summary["margin_after"]
    assert ends == (seen.validations[0]["val/margin"], seen.validations[3]["val/margin"])
    recorded = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in recorded if "val/margin" in line] == [0, 2, 3]
    assert f"margin on 3 held-out problems: {ends[0]:.3f} before, {ends[1]:.3f} after" in capfd.readouterr().out


def test_what_a_module_measures_can_end_the_run(policy: Path, reference: str, tmp_path: Path) -> None:
    stop = EarlyStopping("val/margin", mode="max", stopping_threshold=-1e9)
    settings = {"max_steps": 3, "callbacks": [stop]}
    assert fit(Fit(dpo(policy, reference), data(held_out=3), tmp_path, settings=settings)).summary["steps"] == 0


def test_validate_says_what_a_module_measures_before_the_first_step(
    policy: Path, reference: str, tmp_path: Path
) -> None:
    seen, strategy = Seen(), SingleProcess()
    fit(Fit(dpo(policy, reference), data(held_out=3), tmp_path / "fit", settings={"callbacks": [seen]}))
    trainer = Trainer(str(tmp_path / "run"), accelerator="cpu", strategy=strategy)
    assert trainer.validate(dpo(policy, reference), data(held_out=3)) == {"problems": 3, **seen.validations[0]}
    assert all(role.optimizer is None for role in strategy.roles.values())


def test_an_algorithm_that_generates_nothing_needs_no_engine(policy: Path, reference: str, tmp_path: Path) -> None:
    run = Fit(dpo(policy, reference), data(held_out=3), tmp_path, engine=NeverSetUp())
    assert fit(run).summary["steps"] == 1


class NamesRows(DPO):
    def validation_step(self, batch: Pairs) -> None:
        numbers = torch.tensor([float(row["question"].split("+")[0]) for row in batch.rows])
        self.log("val/number", numbers)
        self.log("val/mean", self.mean(numbers))
        self.log("val/plain", 1.5)
        assert not torch.is_grad_enabled()


def test_each_held_out_row_counts_once_on_any_number_of_ranks(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    run = Fit(NamesRows(CausalLM(str(policy))), data(held_out=5), tmp_path, partial(DeepSpeedStrategy, 2))
    summary = ranks2.run(fit, run)[0].summary
    assert (summary["number_before"], summary["mean_before"]) == (2.0, 2.0)  # (0 + 1 + 2 + 3 + 4) / 5
    assert summary["plain_before"] == 1.5


class PairsAndRows(WithDatasetRows, Protocol):
    """The fields that a loss of pairs reads, and the dataset's rows."""

    prompt_ids: Ragged
    chosen_ids: Ragged
    rejected_ids: Ragged


class Odd(DPO):
    """Learns from every second row."""

    record: list[str]

    @node(type="filter")
    def odd(self, batch: WithDatasetRows) -> PerSample:
        return torch.tensor([int(row["question"][0]) % 2 == 1 for row in batch.rows], dtype=torch.bool)

    @node(role="actor", type="train")
    def actor_loss(self, batch: PairsAndRows, ref_logprobs: PerSample) -> PerSample:  # type: ignore[override]
        self.record = [row["question"] for row in batch.rows]
        return super().actor_loss(batch, ref_logprobs)  # type: ignore[arg-type]


def test_pairs_pass_a_filter(policy: Path, tmp_path: Path) -> None:
    # Rows 1 and 3 are odd; an epoch draws four of the five, so two epochs fill a step.
    learned = fit(Fit(Odd(CausalLM(str(policy))), data(2), tmp_path)).record
    assert len(learned) == 2
    assert {*learned} <= {"1+1=", "3+3="}


def test_pairs_without_a_rejected_side_are_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"row 0 has no column `rejected`; columns found: .*`data.rejected`"):
        fit(Fit(DPO(CausalLM(str(policy))), answers((3, 4), 2), tmp_path))  # `answer` is named as the chosen one


def test_a_rejected_side_that_nobody_reads_is_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`data.rejected` is 'bad', and SFT reads `batch` as Batch, whose rows"):
        fit(Fit(SFT(CausalLM(str(policy))), data(), tmp_path))


def test_held_out_rows_that_nothing_is_measured_on_are_refused(policy: Path, tmp_path: Path) -> None:
    held_out = answers((3, 4), 2)
    held_out.validation = held_out.train
    with pytest.raises(UserError, match=r"`data.validation` is set but the module has no reward to score responses"):
        fit(Fit(RecordingSFT(str(policy)), held_out, tmp_path))
