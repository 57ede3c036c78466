"""Several datasets as one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlflow import Batch, Rollout, Trainer, UserError, node
from rlflow.algorithms import GRPO, SFT
from rlflow.data import MixedDataset, Mixture, PromptData
from rlflow.data.loader import Loader
from rlflow.data.mixture import apportioned
from rlflow.data.pictures import without_pictures
from rlflow.environments.environment import Environment
from rlflow.functional import Aggregation
from rlflow.models.tiny import write_tiny_model
from rlflow.rewards import ByDataset, CallableReward, ExactMatch, RewardInput, WeightedSum
from rlflow.rewards.reward import OnError
from rlflow.strategies import SingleProcess
from rlflow.types import WithTexts
from tests.controller.runs import ZERO2, Fit, RecordingSFT, StopsAfter, failing_fit, fit
from tests.ranks import RankPool


def rows(name: str, count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{name}{i}", "answer": str(i)} for i in range(count)]


Weight = float | list[tuple[int, float]]


def mixed(**weights: tuple[int, Weight]) -> Mixture:
    return Mixture({name: MixedDataset(rows(name, count), weight) for name, (count, weight) in weights.items()})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture") / "tiny"
    return write_tiny_model(folder, hidden_size=32, intermediate_size=48, layers=1, max_position=64)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    return found


def loader_of(source: Mixture, tokenizer: PreTrainedTokenizerBase, step: int, limit: int | None = None) -> Loader:
    return Loader(source, PromptData(source, prompts_per_step=step).resolved(), tokenizer, seed=3, limit=limit)


def drawn(loader: Loader, draws: Sequence[int], shards: int = 1) -> list[str]:
    return [
        row["prompt"] for draw in draws for shard in range(shards) for row in loader.batch(draw, shard, shards)[0].rows
    ]


def test_each_step_has_the_datasets_in_proportion_to_their_weights(tokenizer: PreTrainedTokenizerBase) -> None:
    loader = loader_of(mixed(a=(20, 2.0), b=(10, 1.0)), tokenizer, step=6)
    for draw in range(12):
        assert Counter(prompt[0] for prompt in drawn(loader, [draw])) == {"a": 4, "b": 2}


def test_a_small_dataset_of_a_large_weight_is_passed_over_several_times(tokenizer: PreTrainedTokenizerBase) -> None:
    loader = loader_of(mixed(a=(16, 1.0), b=(4, 1.0)), tokenizer, step=4)
    # An epoch is 20 prompts: 10 of `b`, so two passes and half of the third, which the next epoch finishes.
    of_b = [prompt for prompt in drawn(loader, range(10)) if prompt[0] == "b"]
    assert len(of_b) == 20
    for start in range(0, 20, 4):
        assert set(of_b[start : start + 4]) == {"b0", "b1", "b2", "b3"}
    assert of_b[:4] != of_b[4:8] or of_b[4:8] != of_b[8:12]  # in another order in each pass
    assert len({prompt for prompt in drawn(loader, range(8)) if prompt[0] == "a"}) == 16


@pytest.mark.parametrize("of_a", [1.5, [(2, 1.0), (6, 0.0), (8, 3.0)]])
def test_a_draw_depends_neither_on_draws_before_nor_on_shards(of_a: Weight, tokenizer: PreTrainedTokenizerBase) -> None:
    source = mixed(a=(13, of_a), b=(7, 1.0), c=(3, 0.5))
    one = drawn(loader_of(source, tokenizer, step=5), range(9))
    assert drawn(loader_of(source, tokenizer, step=5), range(9), shards=3) == one
    assert drawn(loader_of(mixed(a=(13, of_a), b=(7, 1.0), c=(3, 0.5)), tokenizer, step=5), [7]) == one[35:40]


def test_weights_with_a_schedule_are_those_of_each_step(tokenizer: PreTrainedTokenizerBase) -> None:
    loader = loader_of(mixed(a=(5, [(1, 1.0), (5, 0.0)]), b=(7, [(1, 0.0), (5, 1.0)])), tokenizer, step=4)
    counts = [Counter(prompt[0] for prompt in drawn(loader, [draw])) for draw in range(8)]
    assert [step["a"] for step in counts] == [4, 4, 3, 2, 1, 0, 0, 0]  # a quarter less in each step from 1 to 5
    assert [step["b"] for step in counts] == [0, 0, 1, 2, 3, 4, 4, 4]
    of_b = [prompt for prompt in drawn(loader, range(8)) if prompt[0] == "b"]
    assert len({*of_b[:7]}) == len({*of_b[7:14]}) == 7  # passed over once, and again


def test_fractions_of_prompts_are_made_up_for_in_later_steps(tokenizer: PreTrainedTokenizerBase) -> None:
    loader = loader_of(mixed(a=(9, [(0, 1.0), (999, 1.0)]), b=(9, 2.0), c=(9, 4.0)), tokenizer, step=1)
    # of 70 prompts a seventh, two and four sevenths; a step of one prompt has one dataset
    assert Counter(prompt[0] for prompt in drawn(loader, range(70))) == {"a": 10, "b": 20, "c": 40}


def numbered(count: int, first: int, weight: Weight) -> MixedDataset:
    return MixedDataset([{"prompt": f"{i}=", "answer": "1", "number": i} for i in range(first, first + count)], weight)


def scheduled_run(model: Path, folder: Path, strategy: Any = SingleProcess, **settings: Any) -> Fit:
    source = Mixture({"a": numbered(9, 0, [(0, 1.0), (5, 0.0)]), "b": numbered(5, 9, [(0, 0.0), (5, 1.0)])})
    given = {"max_steps": 7, "save_every_n_steps": 1, **settings}
    return Fit(
        RecordingSFT(str(model)), PromptData(source, None, 6, response="answer"), folder, strategy, settings=given
    )


def test_a_run_with_a_schedule_draws_the_same_rows_on_three_ranks_and_after_a_resume(
    model: Path, tmp_path: Path, ranks3: RankPool
) -> None:
    whole = fit(scheduled_run(model, tmp_path / "whole"))
    first = ranks3.run(fit, scheduled_run(model, tmp_path / "3", ZERO2, callbacks=[StopsAfter(4)]))[0]
    rest = fit(scheduled_run(model, tmp_path / "3", ckpt_path="last"))
    assert first.record["drawn"] + rest.record["drawn"] == whole.record["drawn"]
    # Of 6 prompts 6, 4.8, 3.6, 2.4, 1.2 and none are of `a`: 6, 10.8, 14.4, 16.8 and 18 in all.
    assert [round(step["data/a/share"] * 6) for step in first.steps + rest.steps] == [6, 5, 3, 3, 1, 0, 0]
    assert [sum(number < 9 for number in step) for step in whole.record["drawn"]] == [6, 5, 3, 3, 1, 0, 0]


def test_a_limit_takes_rows_of_every_dataset(tokenizer: PreTrainedTokenizerBase) -> None:
    loader = loader_of(mixed(a=(20, 1.0), b=(10, 1.0)), tokenizer, step=3, limit=6)
    assert [row["prompt"] for row in loader.all(0, 1)[0].rows] == ["a0", "a1", "a2", "a3", "b0", "b1"]


def test_a_dataset_writes_its_prompt_by_a_column_and_a_template() -> None:
    math = MixedDataset(
        [{"problem": {"text": "2+2"}, "hint": "add"}], prompt="problem.text", template="{prompt}=({hint})"
    )
    source = Mixture({"math": math, "plain": rows("p", 1)})
    assert source.read([1, 0]) == [
        {"prompt": "p0", "answer": "0", "dataset": "plain"},
        {"problem": {"text": "2+2"}, "hint": "add", "prompt": "2+2=(add)", "dataset": "math"},
    ]


def test_prompts_are_read_where_a_template_writes_them_whichever_dataset_is_first() -> None:
    asked, written = [{"question": "1+1="}], MixedDataset([{"question": "2+2="}], template="{question} Think.")
    for source in (Mixture({"sums": asked, "math": written}), Mixture({"math": written, "sums": asked})):
        data = PromptData(source).resolved()
        assert data.prompt == "prompt"
        assert {row["prompt"] for row in data.train.read([0, 1])} == {"1+1=", "2+2= Think."}
    for train, settings in ((source, {"prompt": "question"}), (asked, {"validation": source})):
        with pytest.raises(UserError, match=r"read from the column `question`, and a `template` or `prompt` in `data"):
            PromptData(train, **settings).resolved()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: MixedDataset([], weight=0.0), "`weight` is 0.0"),
        (lambda: MixedDataset([], weight=[(4, 1.0), (4, 2.0)]), r"points at the steps \[4, 4\]; give each a later"),
        (lambda: MixedDataset([], weight=[(0, 1.0), (4, -2.0)]), r"has the weights \[1.0, -2.0\]; give 0 or more"),
        (lambda: MixedDataset([], weight=[(0, 0.0)]), r"has the weights \[0.0\]"),
        (
            lambda: mixed(a=(3, [(0, 1.0), (4, 0.0)]), b=(3, [(5, 0.0), (6, 1.0)])),
            "all datasets have the weight 0 at step 4",
        ),
        (lambda: MixedDataset([], max_response_length=0), "`max_response_length` is 0"),
        (lambda: len(mixed(a=(3, 1.0), b=(0, 1.0))), "`datasets.b` has no rows"),
        (lambda: Mixture({"a b": rows("a", 1)}), "has the name 'a b'"),
        (
            lambda: Mixture({"a": [{"prompt": "1", "dataset": "web"}]}).read([0]),
            "has a column `dataset` already, 'web'",
        ),
        (
            lambda: Mixture({"a": MixedDataset([{"question": "1+1="}], template="{prompt} Think.")}).read([0]),
            "`datasets.a`, row 0 has no column `prompt`; columns found: question, dataset",
        ),
        (
            lambda: mixed(a=(3, 1e6), b=(3, 1.0)).drawn(torch.arange(6), 0, lambda of, *_: of, 2),
            "`b` of the mixture gets none",
        ),
    ],
)
def test_what_cannot_be_mixed_is_refused(source: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        source()


def test_whole_numbers_in_proportion_add_up_to_the_total() -> None:
    assert apportioned([2.0, 1.0], 10) == [7, 3]
    assert apportioned([1.0, 1.0, 1.0], 10) == [4, 3, 3]


def tenth(response: str) -> float:
    return 0.1


def test_a_response_gets_the_score_of_its_datasets_reward() -> None:
    reward = ByDataset({"a": ExactMatch(), "b": CallableReward(tenth)})
    given = [{"dataset": "b", "answer": "1"}, {"dataset": "a", "answer": "1"}, {"dataset": "a", "answer": "2"}]
    assert reward.score(RewardInput(["1", "1", "1"], given)).total == [0.1, 1.0, 0.0]
    with pytest.raises(UserError, match="of the dataset `c`, and `rewards` has one for a, b"):
        reward.check({"dataset": "c"})


def undecided(completions: list[str], **_: object) -> list[float | None]:
    return [None] * len(completions)


def test_a_sample_that_its_datasets_reward_leaves_out_does_not_count_in_a_sum() -> None:
    by_dataset = ByDataset({"a": ExactMatch(), "b": CallableReward(undecided)})
    both = WeightedSum({"mine": by_dataset, "tenth": CallableReward(tenth)})
    given = RewardInput(["1", "1"], [{"dataset": "b", "answer": "1"}, {"dataset": "a", "answer": "1"}])
    assert by_dataset.score(given).absent == {0}
    assert both.score(given).total == pytest.approx([0.1, 1.1])


@pytest.mark.parametrize("on_error", ["zero", "drop", "raise"])
def test_a_sample_that_no_reward_applies_to_gets_the_policy_of_its_datasets_reward(on_error: OnError) -> None:
    reward = ByDataset({"a": ExactMatch(), "b": CallableReward(undecided, on_error=on_error)})
    given = RewardInput(["1", "1"], [{"dataset": "a", "answer": "1"}, {"dataset": "b", "answer": "1"}])
    if on_error == "raise":
        with pytest.raises(UserError, match="`undecided` returned None for sample 0"):
            reward.settled(reward.score(given), given)
    else:
        settled = reward.settled(reward.score(given), given)
        assert (settled.total, settled.failed, settled.absent) == ([1.0, 0.0], {1: on_error}, frozenset())


def test_a_picture_of_a_dataset_whose_prompt_is_another_column_is_not_sent() -> None:
    url = "data:image/png;base64," + "A" * 100
    messages = [{"role": "user", "content": [{"type": "image", "image": url}]}]
    (row,) = Mixture({"a": MixedDataset([{"chat": messages}], prompt="chat")}).read([0])
    assert url not in str(without_pictures(row, "prompt", None))


@dataclass(eq=False)
class Lengths(GRPO):
    """Records of each step the rows' first characters, and the lengths of their responses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.record: list[tuple[str, int]] = []

    @node
    def look(self, rollout: WithTexts) -> None:
        lengths = rollout.lengths.tolist()
        self.record += zip([row["prompt"][0] for row in rollout.rows], lengths, strict=True)


def limited() -> Mixture:
    return Mixture({"a": MixedDataset(rows("a", 4), max_response_length=2), "b": rows("b", 4)})


def test_a_response_has_the_longest_length_of_its_dataset(model: Path, tmp_path: Path) -> None:
    records = []
    for name, source in {"limited": limited(), "plain": mixed(a=(4, 1.0), b=(4, 1.0))}.items():
        module = Lengths(str(model), reward=CallableReward(starts_with_a_digit), group_size=4, max_response_length=6)
        held_out = Mixture({"a": source.datasets["a"]})
        trainer = Trainer(tmp_path / name, accelerator="cpu", max_steps=1)
        trainer.fit(module, PromptData(source, held_out, prompts_per_step=8))
        assert (trainer.callback_metrics["val/length"] <= 2) == (name == "limited")
        records.append(module.record)
    limited_, plain = records
    assert {of for of, length in limited_ if length > 2} == {"b"}
    # Seeds follow from the row, so each response begins as it would without a limit.
    assert limited_ == [(of, min(2, length) if of == "a" else length) for of, length in plain]


def test_predicted_responses_have_the_longest_length_of_their_dataset_too(model: Path, tmp_path: Path) -> None:
    module = GRPO(str(model), reward=CallableReward(starts_with_a_digit), group_size=4, max_response_length=6)
    found = Trainer(tmp_path / "run", accelerator="cpu", val_samples=4).predict(module, PromptData(limited()))
    lines = [json.loads(line) for line in Path(found["path"]).read_text().splitlines()]
    longest = {of: max(line["tokens"] for line in lines if line["prompt"][0] == of) for of in "ab"}
    assert longest["a"] == 2 < longest["b"]


class Continues(GRPO):
    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        return self.generate(self.actor.generate(batch, self.group_size, max_new_tokens=1))


def test_responses_that_were_cut_at_the_length_of_a_dataset_are_not_continued(model: Path, tmp_path: Path) -> None:
    module = Continues(str(model), reward=CallableReward(tenth), group_size=2, max_response_length=4)
    error = failing_fit(Fit(module, PromptData(limited(), None, prompts_per_step=4), tmp_path)).error
    assert "node `rollout` continues responses, and a dataset has a `max_response_length` of its own" in error


class Spells:
    """Says the row's prompt again, and is over."""

    def reset(self, prompt: str) -> None:
        self.prompt = prompt

    def initial_observation(self) -> str:
        return self.prompt

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"reward": float(self.prompt[0] == "a"), "episode_done": True}


class Counts(Spells):
    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"reward": 10.0 + float(self.prompt[0] == "b"), "episode_done": True}


def test_a_row_is_answered_by_the_environment_of_its_dataset(model: Path, tmp_path: Path) -> None:
    environment = Environment({"a": Spells, "b": Counts}, column="dataset")
    module = GRPO(str(model), environment=environment, group_size=2, max_response_length=3)
    data = PromptData(mixed(a=(4, 1.0), b=(4, 3.0)), None, prompts_per_step=4, chat_template=True, max_prompt_length=40)
    (step,) = fit(Fit(module, data, tmp_path)).steps
    assert step["reward/mean"] == pytest.approx((1 + 3 * 11) / 4)


LONGER: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "too long": ({"max_response_length": 1}, {}, "`module.max_response_length` is 1, for which memory is planned"),
    "overlong": ({"overlong_buffer": 0.5}, {}, "`module.overlong_buffer` is set"),
    "environment": ({"environment": Environment(Spells)}, {}, "GRPO has an environment"),
    "in parts": ({}, {"partial_rollout": 4}, "`trainer.partial_rollout` continues responses"),
}


@pytest.mark.parametrize("why", LONGER)
def test_a_length_of_a_dataset_that_something_would_not_know_is_refused(why: str, model: Path, tmp_path: Path) -> None:
    settings, of_trainer, message = LONGER[why]
    given = {"group_size": 2, "max_response_length": 6, **settings}
    module = GRPO(str(model), reward=CallableReward(tenth), **given)
    run = Fit(module, PromptData(limited(), None, prompts_per_step=4), tmp_path, settings=of_trainer)
    error = failing_fit(run).error
    assert error.startswith("`max_response_length` of the dataset `a` is 2, and ")
    assert message in error


def starts_with_a_digit(response: str) -> float:
    return float(response[:1].isdigit())


def test_training_and_validation_measure_each_dataset(model: Path, tmp_path: Path) -> None:
    reward = ByDataset({"a": CallableReward(starts_with_a_digit), "b": CallableReward(tenth)})
    module = GRPO(str(model), reward=reward, group_size=2, max_response_length=3)
    source = mixed(a=(8, 1.0), b=(4, 1.0))
    trainer = Trainer(tmp_path / "run", accelerator="cpu", max_steps=1, val_samples=2)
    trainer.fit(module, PromptData(source, source, prompts_per_step=4))
    metrics = trainer.callback_metrics
    assert metrics["reward/b/mean"] == pytest.approx(0.1)
    assert metrics["reward/mean"] == pytest.approx((metrics["reward/a/mean"] + metrics["reward/b/mean"]) / 2)
    # Validation has all 8 and 4 rows, whatever the weights.
    assert metrics["val/reward"] == pytest.approx((8 * metrics["val/a/reward"] + 4 * metrics["val/b/reward"]) / 12)
    assert metrics["val/b/accuracy"] == 0.0
    assert "val/a/pass@2" in metrics


@pytest.mark.parametrize("aggregation", ["token-mean", "constant"])
def test_the_loss_of_held_out_responses_is_measured_of_each_dataset(
    aggregation: Aggregation, model: Path, tmp_path: Path
) -> None:
    source = mixed(a=(4, 1.0), b=(4, 1.0))  # responses of one character and the end of text: as many tokens of each
    trainer = Trainer(tmp_path / "run", accelerator="cpu", max_steps=1)
    module = SFT(str(model), loss_aggregation=aggregation)
    trainer.fit(module, PromptData(source, source, prompts_per_step=4, response="answer"))
    metrics = trainer.callback_metrics
    assert metrics["val/loss"] == pytest.approx((metrics["val/a/loss"] + metrics["val/b/loss"]) / 2)
    assert metrics["val/a/loss"] != metrics["val/b/loss"]
